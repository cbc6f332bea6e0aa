"""Does a fix do what the original does? Asked on fresh random inputs, before it runs for anybody."""
