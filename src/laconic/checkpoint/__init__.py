"""Saving a whole training run and going on with it, on as many ranks or others.

`save` and `load` are for a loop of your own; on as many ranks, a resumed run is the same run, to the bit. `RankState` is for a
`torch.distributed.checkpoint` of your own, with `island_key` if the model is sharded.

>>> import tempfile, torch, laconic
>>> store = torch.distributed.HashStore()
>>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
>>> model, folder = torch.nn.Linear(4, 2), tempfile.mkdtemp()
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
>>> with laconic.attach(model, optimizer, "diloco(2)") as run:
...     if laconic.checkpoint.latest(folder):  # after a restart
...         loaded = laconic.checkpoint.load(folder, run=run)
...     for batch in torch.ones(3, 8, 4):
...         model(batch).sum().backward()
...         optimizer.step()
...         optimizer.zero_grad()
...     saving = laconic.checkpoint.save(folder, run=run)
>>> laconic.checkpoint.latest(folder).name
'step-00000003'
>>> torch.distributed.destroy_process_group()
"""

from laconic.checkpoint.loading import Loaded, latest, load
from laconic.checkpoint.saving import Saving, save
from laconic.checkpoint.stateful import RankState, island_key

__all__ = ["Loaded", "RankState", "Saving", "island_key", "latest", "load", "save"]
