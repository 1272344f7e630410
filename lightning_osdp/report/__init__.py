"""Show what was decided: tables, explanations, comparisons, figures and a page."""
