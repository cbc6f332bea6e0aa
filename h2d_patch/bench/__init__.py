"""`h2d-patch bench`: what the fixes' copies cost on this machine, against the originals and upstream's form of them."""
