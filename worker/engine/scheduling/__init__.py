"""What a step computes: admission, budgets, preemption, and the plan that says it."""
