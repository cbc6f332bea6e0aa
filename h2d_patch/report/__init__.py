"""What an operator sees: `check` before a server starts, state and `status` while it runs."""
