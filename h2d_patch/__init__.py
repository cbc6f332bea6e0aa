"""Hotfixes for the host-to-device copies of the installed vLLM release, as a vLLM plugin."""

__version__ = "0.1.0"
