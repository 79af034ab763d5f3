"""A trained model with its tokenizer, opened from the folder of a run."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from ..nn import LanguageModel, Translator
from . import checkpoint
from . import tokenizer as texts
from .generate import Beam, beam_search
from .settings import LMSettings, TranslateSettings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["Trained", "history", "open_model"]


@dataclass
class Trained:
    """A trained model with its tokenizer, in eval mode; made by `open_model`.

    Attributes:
        model: A `regard.nn.LanguageModel` or `regard.nn.Translator`.
        kind: "lm" or "translate".
        settings: The `LMSettings` or `TranslateSettings` of the run.
        tokenizer: A tokenizer of the `tokenizers` library.

    Example:
        >>> from regard.nn import LanguageModel
        >>> from regard.learn import LMSettings
        >>> from regard.learn.tokenizer import characters
        >>> model = LanguageModel(4, dim=8, heads=2, layers=1).eval()
        >>> trained = Trained(model, "lm", LMSettings(), characters("cats"))
        >>> trained.tokens("cat")
        ['c', 'a', 't']
    """

    model: LanguageModel | Translator
    kind: Literal["lm", "translate"]
    settings: LMSettings | TranslateSettings
    tokenizer: Tokenizer

    @property
    def context(self) -> int | None:
        """Number of tokens a language model looks back; None for a translator.

        Example:
            >>> from regard.learn import LMSettings
            >>> from regard.learn.tokenizer import characters
            >>> model = regard.nn.LanguageModel(4, dim=8, heads=2, layers=1).eval()
            >>> trained = Trained(model, "lm", LMSettings(context=16), characters("cats"))
            >>> trained.context
            16
        """
        return self.settings.context if isinstance(self.settings, LMSettings) else None

    @property
    def device(self) -> torch.device:
        """The device of the model.

        Example:
            >>> from regard.learn import LMSettings
            >>> from regard.learn.tokenizer import characters
            >>> model = regard.nn.LanguageModel(4, dim=8, heads=2, layers=1).eval()
            >>> trained = Trained(model, "lm", LMSettings(context=16), characters("cats"))
            >>> trained.device
            device(type='cpu')
        """
        return self.model.embedding.table.weight.device

    def ids(self, text: str) -> Tensor:
        """Token ids of a text.

        Args:
            text: The text; for a language model, in characters it was trained on.

        Returns:
            Ids ``(1, t)``; a translator's source ends with ``<end>``.

        Raises:
            ValueError: The text is empty, or has a character that the model never saw.

        Example:
            >>> from regard.learn import LMSettings
            >>> from regard.learn.tokenizer import characters
            >>> model = regard.nn.LanguageModel(4, dim=8, heads=2, layers=1).eval()
            >>> trained = Trained(model, "lm", LMSettings(context=16), characters("cats"))
            >>> trained.ids("cat").shape
            torch.Size([1, 3])
        """
        return torch.tensor([self._numbers(text)], device=self.device)

    def _numbers(self, text: str) -> list[int]:
        numbers = texts.encode(self.tokenizer, text)
        if self.kind == "translate":
            numbers = [*numbers, self._special(texts.END)]
        if not numbers:
            raise ValueError("the text is empty: at least one token is needed.")
        return numbers

    def default_prompt(self) -> Tensor:
        """The prompt where there is none: a new line, or the first token of a vocabulary that cannot write one.

        Returns:
            Its ids ``(1, t)``.

        Example:
            >>> from regard.learn import LMSettings
            >>> from regard.learn.tokenizer import characters
            >>> model = regard.nn.LanguageModel(4, dim=8, heads=2, layers=1).eval()
            >>> trained = Trained(model, "lm", LMSettings(context=16), characters("cats"))
            >>> trained.default_prompt()
            tensor([[0]])
        """
        try:
            return self.ids("\n")
        except ValueError:  # the text that it was trained on is one line
            return torch.tensor([[0]], device=self.device)

    def tokens(self, text: str) -> list[str]:
        """The tokens of a text as strings.

        Args:
            text: The text, as for `ids`.

        Returns:
            One string for each of `ids`.

        Example:
            >>> from regard.learn import LMSettings
            >>> from regard.learn.tokenizer import characters
            >>> model = regard.nn.LanguageModel(4, dim=8, heads=2, layers=1).eval()
            >>> trained = Trained(model, "lm", LMSettings(context=16), characters("cats"))
            >>> trained.tokens("cat")
            ['c', 'a', 't']
        """
        return self._strings(self._numbers(text))

    def _strings(self, numbers: list[int]) -> list[str]:
        return [self.tokenizer.id_to_token(number) or texts.UNKNOWN for number in numbers]

    def _special(self, name: str) -> int:
        number = self.tokenizer.token_to_id(name)
        assert number is not None, "a translator's tokenizer has the special tokens: `read_tokenizer` checks it"
        return number

    @torch.no_grad()
    def translate(self, text: str, beam: Beam | None = None) -> str:
        """Translate a sentence by beam search.

        Args:
            text: The sentence.
            beam: Width and length penalty. Default: ``Beam(5, 1.0)``.

        Returns:
            The translation.

        Raises:
            ValueError: This is a language model.

        Example:
            >>> from regard.learn import TranslateSettings
            >>> from regard.learn.tokenizer import pairs_bpe
            >>> tokenizer = pairs_bpe(["the cat", "le chat"], 20)
            >>> model = regard.nn.Translator(tokenizer.get_vocab_size(), dim=8, heads=2, layers=1).eval()
            >>> trained = Trained(model, "translate", TranslateSettings(), tokenizer)
            >>> isinstance(trained.translate("the cat"), str)
            True
        """
        return self.translate_all([text], beam)[0]

    @torch.no_grad()
    def translate_all(self, lines: list[str], beam: Beam | None = None, batch: int | None = None) -> list[str]:
        """Translate many sentences, in batches of similar length.

        Args:
            lines: The sentences; an empty one stays empty.
            beam: Width and length penalty. Default: ``Beam(5, 1.0)``.
            batch: Sentences at a time. Default: 64 on a CPU; 512 on a GPU, where a step takes about as long for many.

        Returns:
            One translation per line.

        Example:
            >>> from regard.learn import TranslateSettings
            >>> from regard.learn.tokenizer import pairs_bpe
            >>> tokenizer = pairs_bpe(["the cat", "le chat"], 20)
            >>> model = regard.nn.Translator(tokenizer.get_vocab_size(), dim=8, heads=2, layers=1).eval()
            >>> trained = Trained(model, "translate", TranslateSettings(), tokenizer)
            >>> len(trained.translate_all(["the cat", "", "the cat"]))
            3
        """
        self.require("translate")
        model = cast(Translator, self.model)
        full = [n for n, line in enumerate(lines) if line.strip()]
        encoded = {n: self._numbers(lines[n]) for n in full}  # not by `ids`, through the device and back
        limit = model.max_positions
        if limit is not None and (over := next((n for n in full if len(encoded[n]) > limit), None)) is not None:
            raise ValueError(
                f"line {over + 1} has {len(encoded[over])} tokens, and this model has learned {limit} positions: "
                "shorten it, or train with --positions rotary or sinusoidal."
            )
        order = sorted(full, key=lambda n: len(encoded[n]))
        batch = batch or (64 if self.device.type == "cpu" else 512)
        written = [""] * len(lines)
        start, end = self._special(texts.START), self._special(texts.END)
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            longest = max(len(encoded[n]) for n in chosen)
            pad = model.PAD
            source = torch.tensor([encoded[n] + [pad] * (longest - len(encoded[n])) for n in chosen])
            targets = beam_search(model, source.to(self.device), start, end, beam or Beam())
            for n, numbers in zip(chosen, targets, strict=True):
                written[n] = self.tokenizer.decode(numbers)
        return written

    @torch.no_grad()
    def run(self, text: str) -> list[str] | tuple[list[str], list[str]]:
        """Run the model once over a text, inside `regard.record`.

        A translator first searches its translation, unrecorded, and then runs once over both sentences.

        Args:
            text: The text.

        Returns:
            The tokens of a language model; the source's and the target's tokens of a translator.

        Example:
            >>> from regard.learn import LMSettings
            >>> from regard.learn.tokenizer import characters
            >>> model = regard.nn.LanguageModel(4, dim=8, heads=2, layers=1).eval()
            >>> trained = Trained(model, "lm", LMSettings(context=16), characters("cats"))
            >>> with regard.record(trained.model) as seen:
            ...     tokens = trained.run("cat")
            >>> tokens, seen[0].shape
            (['c', 'a', 't'], torch.Size([1, 2, 3, 3]))
        """
        ids = self.ids(text)
        if isinstance(self.model, LanguageModel):
            context = self.context or ids.shape[1]
            if ids.shape[1] > context:
                raise ValueError(f"this model looks back {context} tokens, got {ids.shape[1]}: use a shorter text.")
            self.model(ids)
            return self._strings(ids[0].tolist())
        from ..recorder.hooks import tap

        with tap.suspended():  # record the one pass over both sentences, not the search
            start, end = self._special(texts.START), self._special(texts.END)
            target = [start, *beam_search(self.model, ids, start, end, Beam())[0]]
        self.model(ids, torch.tensor([target], device=ids.device))
        return self._strings(ids[0].tolist()), self._strings(target)

    def require(self, kind: str) -> None:
        """Check what kind of model this is.

        Args:
            kind: "lm" or "translate".

        Raises:
            ValueError: The model is of the other kind.

        Example:
            >>> from regard.learn import LMSettings
            >>> from regard.learn.tokenizer import characters
            >>> model = regard.nn.LanguageModel(4, dim=8, heads=2, layers=1).eval()
            >>> trained = Trained(model, "lm", LMSettings(context=16), characters("cats"))
            >>> trained.require("lm")
        """
        if self.kind != kind:
            names = {"lm": "a language model", "translate": "a translator"}
            raise ValueError(f"{names[kind]} is needed, got {names[self.kind]}.")


def open_model(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> Trained:
    """Open the best model of a run. Checksums of settings, tokenizer and tensors are verified.

    Args:
        path: The folder that `regard learn`, `lm` or `translate` wrote.
        device: Where the model goes.

    Returns:
        The model in eval mode, with its tokenizer.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: The folder holds no run, no model yet, or damaged files.

    Example:
        >>> import pathlib, tempfile
        >>> from regard.learn import lm
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "text").write_text("the cat sat on the mat. " * 20)
        >>> _ = lm(folder / "text", folder / "run", steps=2, dim=8, heads=2, layers=1, context=8, device="cpu")
        >>> trained = open_model(folder / "run")
        >>> trained.kind, trained.ids("the cat").shape
        ('lm', torch.Size([1, 7]))
        >>> with regard.record(trained.model) as seen:
        ...     tokens = trained.run("the cat")
        >>> seen[0].shape
        torch.Size([1, 2, 7, 7])
    """
    folder = _run_folder(path)
    if not (folder / checkpoint.MODEL).exists():
        raise ValueError(f"{path} holds a run that has saved no model yet; continue it with --resume.")
    kind, settings, _ = checkpoint.read_settings(folder)
    tokenizer = checkpoint.read_tokenizer(folder, kind)
    model = checkpoint.read_model(folder, kind, settings, tokenizer.get_vocab_size())
    return Trained(model.to(device).eval(), kind, settings, tokenizer)  # type: ignore[arg-type]  # by the kind


def _run_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of a run, complete or not."""
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"{path} is no folder; `regard learn … --out {path}` writes one.")
    if not checkpoint.is_checkpoint(folder):
        raise ValueError(
            f"{path} holds no model trained by `regard learn`: {checkpoint.SETTINGS} is missing or another program's."
        )
    return folder


def history(path: str | os.PathLike[str]) -> list[tuple[int, dict[str, float]]]:
    """Entropy and largest score of every head during a run, in the form of `regard.watch`.

    Args:
        path: The folder of the run.

    Returns:
        Pairs (step, numbers), numbers by "layer/statistic/head". `regard.look.View` draws them.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: The folder holds no run, or `history.json` is missing or damaged.

    Example:
        >>> import pathlib, tempfile
        >>> from regard.learn import lm
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "text").write_text("the cat sat on the mat. " * 20)
        >>> _ = lm(folder / "text", folder / "run", steps=2, dim=8, heads=2, layers=1, context=8, device="cpu")
        >>> step, numbers = history(folder / "run")[0]
        >>> step, sorted(numbers)[:2]
        (1, ['body.blocks.0.attention/entropy_share/0', 'body.blocks.0.attention/entropy_share/1'])
    """
    return [
        (
            row["step"],
            {
                f"{layer}/{name}/{head}": value
                for layer, statistics in row["heads"].items()
                for name, values in statistics.items()
                for head, value in enumerate(values)
            },
        )
        for row in checkpoint.read_history(_run_folder(path))
        if "heads" in row
    ]
