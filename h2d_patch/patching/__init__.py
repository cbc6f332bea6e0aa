"""How a fix gets in: locate, recognise, rewrite, install, switch. Knows nothing of tensors."""
