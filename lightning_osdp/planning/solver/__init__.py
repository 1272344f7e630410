"""Exact solver of the memory-constrained choice of one option per operator (a multiple-choice knapsack problem).

    minimise    sum_i time_s(i, x_i)
    subject to  sum_i resident_bytes(i, x_i) + max_i transient_bytes(i, x_i) <= budget_bytes

The paper (arXiv 2209.13258, section 3.2, algorithm 1) walks the choices depth first. This package proves the optimum by
branch and bound. Operators with equal options form a group: only the number of operators per option matters. The
steps, and the functions that implement them:

==================================================================  ====================================================
The knapsack with a maximum in its constraint, per budget           ``knapsack.solve``
The maximum, enumerated: under the cap T, options with a larger     ``knapsack._BranchAndBound``: always the cap of the
transient are excluded and ``budget - T`` bytes are left            least bound next, until no bound is below the best
Linear relaxation under one cap: a greedy walk along the lower      ``relaxation.compute_hulls``,
convex hulls of the options (Sinha and Zoltners 1979)               ``relaxation.solve_relaxation``
Lagrangian relaxation: ``sum_i min_x (time + price * bytes) -``     ``OptionTable.lagrangian_bounds``: all caps in one
``price * capacity`` is a lower bound for every price               pass
Reduced cost ``time + price * bytes`` against the relaxation's      ``Node.fix_by_reduced_cost``, ``Node.reduced_cost``,
solution; options above the gap are fixed to "not taken"            ``Node.reduced_cost_limit``
Pareto lists of (bytes, time), merged within a reduced-cost limit   ``pareto.add``, ``pareto.merge_fronts``; the last
(Horowitz and Sahni 1974)                                           two lists stay unmerged: ``pareto.best_pair``
Branching on the number of hull steps, with a multiplier per step   ``branching.branch``
==================================================================  ====================================================

A round of the search merges only options of small reduced cost. A round that finds a solution within its limit has
found the optimum of its node; a round that finds none has raised the node's lower bound, and the next one allows more.
"""

from lightning_osdp.planning.solver.knapsack import Solution, solve
from lightning_osdp.planning.solver.relaxation import Option

__all__ = ["Option", "Solution", "solve"]
