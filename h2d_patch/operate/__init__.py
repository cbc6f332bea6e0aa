"""What an operator does with a running server: switch, compare, watch. Imports neither torch nor vLLM."""
