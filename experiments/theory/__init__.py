"""Small learning problems whose forgetting can be computed, and the simulations that check the formulas."""
