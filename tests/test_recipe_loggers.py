"""The loggers of docs/recipes.md with the real libraries: `make test-loggers` installs them and runs this file.

The code is taken from the page. Where a library is missing its test is skipped; `make test` skips all of them.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard

pytestmark = pytest.mark.slow

RECIPES = (Path(__file__).parent.parent / "docs" / "recipes.md").read_text()


def logger_of_page(name: str, **names: Any) -> Any:
    """The callback that the page's table shows for a logger."""
    (code,) = re.findall(rf"^\| {re.escape(name)} \| `(.+)` \|$", RECIPES, flags=re.M)
    return eval(code, names)


def class_of_page(name: str, **names: Any) -> type:
    """A class that the page defines; its base class may be the one in the comment behind it."""
    (lines,) = re.findall(rf"^>>> (class {name}[(:].*\n(?:\.\.\. .*\n)+)", RECIPES, flags=re.M)
    first, *rest = lines.replace("\n... ", "\n").split("\n")
    code, _, comment = first.partition("# ")
    exec("\n".join([comment or code, *rest]), names)
    return names[name]


def watched_training(callback: Any) -> dict[str, float]:
    """Two steps of a small model under `regard.watch`, and the last numbers."""
    torch.manual_seed(0)
    last: dict[str, float] = {}

    def both(numbers: dict[str, float], step: int) -> None:
        last.update(numbers)
        callback(numbers, step)

    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
    with regard.watch(model, every=1, callback=both):
        for _ in range(2):
            model(torch.randn(2, 6, 16)).sum().backward()
    return last


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_has_the_numbers_of_every_head(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        last = watched_training(logger_of_page("TensorBoard", writer=writer))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(last)
    name = "layers.1.self_attn/entropy_share/3"
    assert [event.step for event in events.Scalars(name)] == [0, 1]
    assert events.Scalars(name)[-1].value == pytest.approx(last[name])


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_logs_every_head(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    callback = class_of_page("WatchHeads", regard=regard, TrainerCallback=TrainerCallback)()
    config = GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(50, (8, 8))]
    options = TrainingArguments(
        tmp_path, max_steps=2, logging_steps=1, per_device_train_batch_size=4, use_cpu=True, report_to=[], save_strategy="no"
    )  # fmt: skip
    trainer = Trainer(GPT2LMHeadModel(config), options, train_dataset=data, callbacks=[callback])
    seen: list[dict[str, float]] = []

    class Reader(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            seen.append(dict(logs))

    trainer.add_callback(Reader())
    trainer.train()
    heads = [name for name in seen[0] if "/entropy_share/" in name]
    assert len(heads) == 4, "two layers of two heads"
    assert all(0 < seen[0][name] <= 1 for name in heads)


@pytest.mark.filterwarnings("ignore")
def test_lightning_logs_every_head(tmp_path):
    lightning = pytest.importorskip("lightning")
    import lightning.pytorch as pl

    names = {"regard": regard, "lightning": lightning}
    callback = class_of_page("WatchHeadsOfLightning", **names)()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            self.model = torch.nn.TransformerEncoder(layer, 2)

        def training_step(self, batch, _):
            return self.model(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    logger = pl.loggers.CSVLogger(tmp_path)
    trainer = pl.Trainer(
        max_steps=2, logger=logger, log_every_n_steps=1, callbacks=[callback], accelerator="cpu",
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(list(torch.randn(8, 6, 16)), batch_size=4))
    (table,) = tmp_path.rglob("metrics.csv")
    rows = list(csv.DictReader(table.open()))
    assert {f"layers.{n}.self_attn/entropy_share/{h}" for n in range(2) for h in range(4)} <= rows[0].keys()
