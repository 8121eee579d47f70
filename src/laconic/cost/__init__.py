"""How long a step takes: collectives over a link, encoding and decoding, and what of it training hides. Imports no torch
but in `codec.py`."""
