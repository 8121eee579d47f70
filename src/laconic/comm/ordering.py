"""How far exchanges may overlap. Here alone, without torch: the cost model goes by the same numbers."""

# Inside backward, a bucket's next round leaves when the DEPTH-th bucket after it arrives. docs/ordering.md has the measurement.
DEPTH = 2
WINDOW = 4  # between steps: exchanges outstanding at a time; while some travel, another is filled or emptied
