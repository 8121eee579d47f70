"""The one door to the frameworks' private parts: each with the reason why nothing public does.

Tried with pytorch-lightning 2.6.6 and accelerate 1.15.0. The tests of the integrations fail where one of them is gone.
"""

import signal
from collections.abc import Callable, Sequence
from typing import Any

# Lightning


def saves_directories(strategy: Any) -> bool:
    """Whether a ModelParallelStrategy saves a directory and not a file: it was told so, and tells nobody."""
    return bool(getattr(strategy, "_save_distributed_checkpoint", False))


def data_fetcher(trainer: Any) -> Any:
    """What holds the iterator over the training loader. After a resume, it has to be made anew in the right place."""
    return trainer.fit_loop._data_fetcher


def logs_now(trainer: Any) -> bool:
    """Whether the Trainer logs in this step. Lightning's own callbacks ask for it in this way."""
    return bool(trainer._logger_connector.should_update_logs)


BROADCAST_SIGTERM = "_broadcast_sigterm_tensor"  # of the loop over batches: a collective before each of them


def replace_sigterm_handler(trainer: Any, note: Callable[[int, object], None]) -> bool:
    """Put `note` in the place of Lightning's handler of SIGTERM for this fit, and return whether it is in use at all.

    Lightning's own makes a collective in the signal handler. It makes the list of handlers anew for each fit.
    """
    handlers = getattr(signal.getsignal(signal.SIGTERM), "signal_handlers", [])
    theirs = getattr(trainer._signal_connector, "_sigterm_notifier_fn", None)
    if theirs not in handlers or not hasattr(trainer.fit_loop.epoch_loop, BROADCAST_SIGTERM):
        return False  # another version of Lightning, or not in the main thread
    handlers[handlers.index(theirs)] = note
    return True


def signal_connector(trainer: Any) -> Any:
    """Who remembers that a SIGTERM has come: the loop over batches asks it."""
    return trainer._signal_connector


# Accelerate


def prepared_models(accelerator: Any) -> Sequence[Any]:
    """What `prepare` was given, in the order in which Accelerate numbers its files."""
    models: Sequence[Any] = accelerator._models
    return models


def prepared_optimizers(accelerator: Any) -> Sequence[Any]:
    """What `prepare` has made of optimizers: LocalSGD is given none."""
    optimizers: Sequence[Any] = accelerator._optimizers
    return optimizers
