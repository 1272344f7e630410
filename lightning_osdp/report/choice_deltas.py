"""What other choices for operators would change in time and memory, by the costs that a plan holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lightning_osdp.planning.spec.choices import ShardingChoice
from lightning_osdp.planning.spec.plan import ChoiceCost, ExecutionPlan, OperatorPlan
from lightning_osdp.report.operator_runs import OperatorRun


class ChoiceDelta(NamedTuple):
    """Change of time and memory if a run of operators took another choice; negative: less."""

    choice: ShardingChoice
    time_s: float
    memory_bytes: int

    def loss_s(self, price: float) -> float:
        """Return the loss in seconds, memory counted at its price."""
        return self.time_s + price * self.memory_bytes


def choice_deltas(plan: ExecutionPlan, run: OperatorRun) -> list[ChoiceDelta]:
    """Return what each other choice would change if the whole run took it; empty if the plan does not say."""
    first = run.operators[0]
    own_names = {operator.name for operator in run.operators}
    members = own_names.union(*(operator.tensor_group for operator in run.operators))
    partners = [operator for operator in plan.operators if operator.name in members - own_names]
    if any(find_cost(operator, operator.choice) is None for operator in run.operators):
        return []
    if any(find_cost(partner, partner.choice) is None for partner in partners):  # they share a unit
        members, partners = own_names, []
    other_transient = max((cost.transient_bytes for cost in _chosen_costs(plan.operators, members)), default=0)

    def total_cost(choice: ShardingChoice) -> tuple[float, int] | None:
        costs = [find_cost(operator, choice) for operator in run.operators]
        costs += [_partner_cost(partner, choice, plan.memory_shadow_price or 0.0) for partner in partners]
        known = [cost for cost in costs if cost is not None]
        if len(known) < len(costs):
            return None
        largest = max(other_transient, *(cost.transient_bytes for cost in known))
        return sum(cost.time_s for cost in known), sum(cost.resident_bytes for cost in known) + largest

    own = total_cost(first.choice)
    others = {
        alternative.choice: total_cost(alternative.choice)
        for alternative in first.alternatives
        if partners or not first.tensor_group or alternative.tensor_degree == first.choice.tensor_degree
    }
    return [
        ChoiceDelta(choice, other[0] - own[0], other[1] - own[1])
        for choice, other in others.items()
        if other is not None and own is not None and choice != first.choice
    ]


def _partner_cost(partner: OperatorPlan, choice: ShardingChoice, price: float) -> ChoiceCost | None:
    """Return the cost of another operator of a scope if one takes ``choice``: it is cut over as many ranks or not."""
    own = find_cost(partner, partner.choice)
    if own is not None and own.tensor_degree == choice.tensor_degree:
        return own
    costs = [cost for cost in partner.alternatives if cost.tensor_degree == choice.tensor_degree]
    return min(costs, key=lambda cost: cost.time_s + price * cost.resident_bytes, default=None)


def find_cost(operator: OperatorPlan, choice: ShardingChoice) -> ChoiceCost | None:
    """Return the cost of an operator under a choice; None if the plan does not say."""
    return next((cost for cost in operator.alternatives if cost.choice == choice), None)


def _chosen_costs(operators: Iterable[OperatorPlan], excluded: set[str]) -> list[ChoiceCost]:
    costs = [find_cost(operator, operator.choice) for operator in operators if operator.name not in excluded]
    return [cost for cost in costs if cost is not None]
