"""Attach by itself, to a script that knows nothing of laconic but this import.

With plain torchrun, set LACONIC_STRATEGY and let the script `import laconic.auto` before it builds its model. Without the
variable the import does nothing. `laconic run --strategy "diloco(64)" ... script.py` needs not even the import.
"""

import os

from laconic.script.auto import install

if "LACONIC_STRATEGY" in os.environ:
    install(os.environ["LACONIC_STRATEGY"], os.environ.get("LACONIC_ISLAND_SIZE"))
