"""The law of errors: bad input says what must hold, what it got and what to do. One row for every message."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import regard
from regard import (
    Additive,
    Bilinear,
    Cosine,
    Dot,
    Gaussian,
    ScaledDot,
    Similarity,
    Weights,
    attend,
    causal,
    documents,
    padding,
    weights,
    window,
)


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


def words(n: int = 3) -> Weights:
    return weights(x(n, 2)).label(["the", "cat", "the", "sat", "on", "the", "mat"][:n])


META = torch.device("meta")

#: What is called, the exception, and parts of the text: argument, value and remedy.
ROWS: dict[str, tuple[Callable[[], object], type[Exception], list[str]]] = {
    # Queries, keys, values.
    "q is a list": (lambda: weights([[1.0]]), TypeError, ["q must be a tensor", "got list", "torch.as_tensor(q)"]),
    "k is a number": (lambda: weights(x(3, 2), 5), TypeError, ["k must be a tensor", "got int"]),
    "v is a list": (lambda: attend(x(3, 2), x(3, 2), [1]), TypeError, ["v must be a tensor", "got list"]),
    "q is integer": (lambda: weights(x(3, 2, dtype=torch.int64)), TypeError, ["q must be a floating-point tensor", "got dtype torch.int64", ".float()"]),
    "q is bool": (lambda: weights(x(3, 2, dtype=torch.bool)), TypeError, ["q must be", "torch.bool"]),
    "q is complex": (lambda: weights(x(3, 2, dtype=torch.complex64)), TypeError, ["q must be", "torch.complex64"]),
    "v is integer": (lambda: attend(x(3, 2), x(3, 2), x(3, 2, dtype=torch.int32)), TypeError, ["v must be", "torch.int32"]),
    "q has one axis": (lambda: weights(x(3)), ValueError, ["q must be (length, size)", "got shape (3,)"]),
    "q has no axis": (lambda: weights(x()), ValueError, ["q must be", "got shape ()"]),
    "k has one axis": (lambda: weights(x(3, 2), x(2)), ValueError, ["k must be", "shape (2,)"]),
    "devices differ": (lambda: weights(x(3, 2), x(3, 2).to(META)), ValueError, ["q is on cpu", "k on meta", ".to(device)"]),
    "types differ": (lambda: weights(x(3, 2), x(3, 2).double()), ValueError, ["q is torch.float32", "k torch.float64", ".to(dtype)"]),
    "types of v differ": (lambda: attend(x(3, 2), x(3, 2), x(3, 2).half()), ValueError, ["torch.float32", "torch.float16", ".to(dtype)"]),
    "sizes differ": (lambda: weights(x(3, 2), x(3, 5)), ValueError, ["q has size 2", "k has size 5", "needs them equal"]),
    "k is transposed": (lambda: weights(x(3, 2), x(2, 7)), ValueError, ["q has size 2", "k has size 7", "pass k.mT"]),
    "heads do not divide": (lambda: weights(x(1, 8, 5, 2), x(1, 3, 5, 2)), ValueError, ["q has 8 heads and k has 3", "multiple", "q.transpose(1, 2)"]),
    "no key heads": (lambda: weights(x(1, 2, 5, 2), x(1, 0, 5, 2)), ValueError, ["q has 2 heads and k has 0"]),
    "batches do not broadcast": (lambda: weights(x(2, 1, 5, 2), x(3, 1, 5, 2)), ValueError, ["batch axes of q (2,) and k (3,)", "do not broadcast"]),
    # Options.
    "engine is unknown": (lambda: weights(x(3, 2), engine="cuda"), ValueError, ["unknown engine 'cuda'", "'auto'", "'blockwise'", "'reference'"]),
    "attend's engine is unknown": (lambda: attend(x(3, 2), engine="flash"), ValueError, ["unknown engine 'flash'", "'blockwise'"]),
    "a keyword is unknown": (lambda: weights(x(3, 2), maks=causal()), TypeError, ["maks"]),
    "a view's option is misspelt": (lambda: words().show("cat", hed=1), TypeError, ["a view has no option 'hed'", "Did you mean 'head'?"]),
    "a view's option is unknown": (lambda: words().show("cat", colour="red"), TypeError, ["a view has no option 'colour'", "its options are word, target, layer"]),
    "attend's keyword is unknown": (lambda: attend(x(3, 2), is_causal=True), TypeError, ["is_causal"]),
    "align is unknown": (lambda: weights(x(3, 2), align="left"), ValueError, ['"start"', '"end"', "got 'left'"]),
    "align is missing for a mask": (lambda: weights(x(3, 2), x(5, 2), mask=causal()), ValueError, ["causal()", "q has 3 and k 5", 'align="start"', 'align="end"']),
    "align is missing for a part of a mask": (lambda: weights(x(3, 2), x(5, 2), mask=padding(4) & window(1, 1)), ValueError, ["window(1, 1)", 'align="end"']),
    "align is missing for alibi": (lambda: weights(x(3, 2), x(5, 2), score=Dot().alibi(x(1))), ValueError, [".alibi(...)", 'align="start"']),
    "align is missing for modify": (lambda: weights(x(3, 2), x(5, 2), score=Dot().modify(lambda s, i, j: s)), ValueError, [".modify(...)", 'align="end"']),
    "align is missing for documents": (lambda: weights(x(3, 2), x(5, 2), mask=documents([0] * 5)), ValueError, ["documents()", 'align="start"']),
    "align is missing for reach": (lambda: weights(x(3, 2), x(5, 2)).mean_distance(), ValueError, ["mean_distance depends on positions", "3 queries and 5 keys", 'align="end"']),
    "align is missing for a function mask": (lambda: weights(x(3, 2), x(5, 2), mask=lambda i, j: j <= i), ValueError, ['align="end"']),
    # Scores.
    "score's name is unknown": (lambda: weights(x(3, 2), score="dto"), ValueError, ["unknown score 'dto'", "'dot'", "'scaled_dot'", "'cosine'", "Gaussian(sigma)"]),
    "score is a class": (lambda: weights(x(3, 2), score=Gaussian), TypeError, ["an object, not the class", "score=Gaussian(...)"]),
    "score is a number": (lambda: weights(x(3, 2), score=3), TypeError, ["score must be a name, a Score or a function", "got int"]),
    "scale is infinite": (lambda: ScaledDot(float("inf")), ValueError, ["ScaledDot(scale) must be a finite number", "got inf"]),
    "scale is text": (lambda: ScaledDot("1"), ValueError, ["ScaledDot(scale)", "got '1'"]),
    "cosine's scale is NaN": (lambda: Cosine(float("nan")), ValueError, ["Cosine(scale) must be a finite number", "got nan"]),
    "sigma is zero": (lambda: Gaussian(0), ValueError, ["Gaussian(sigma) needs sigma > 0", "got 0"]),
    "sigma is negative": (lambda: Gaussian(-1.5), ValueError, ["sigma > 0", "got -1.5"]),
    "softcap is zero": (lambda: Dot().softcap(0), ValueError, ["softcap(cap) needs a finite cap > 0", "got 0", "Leave it out"]),
    "softcap is negative": (lambda: Dot().softcap(-30.0), ValueError, ["cap > 0", "got -30.0"]),
    "softcap is infinite": (lambda: Dot().softcap(float("inf")), ValueError, ["finite cap", "got inf"]),
    "bias is a number": (lambda: Dot().bias(1.0), TypeError, ["bias(tensor) must be a tensor", "got float", "torch.tensor"]),
    "bias is bool": (lambda: Dot().bias(x(3, 3, dtype=torch.bool)), TypeError, ["bias(tensor) must be a floating-point tensor", "torch.bool"]),
    "bias does not broadcast": (lambda: weights(x(3, 2), score=Dot().bias(x(3, 4))), ValueError, ["bias(tensor) of shape (3, 4)", "(1, 3, 3)"]),
    "bias has too many axes": (lambda: weights(x(1, 3, 2), score=Dot().bias(x(2, 1, 3, 3))), ValueError, ["bias(tensor) of shape (2, 1, 3, 3)", "does not broadcast"]),
    "bias is elsewhere": (lambda: weights(x(3, 2), score=Dot().bias(x(3, 3).to(META))), ValueError, ["bias(tensor) is on meta", "q on cpu", ".to(device)"]),
    "slopes are integers": (lambda: Dot().alibi(torch.tensor([1, 2])), TypeError, ["alibi(slopes)", "torch.int64", ".float()"]),
    "slopes do not fit": (lambda: weights(x(1, 2, 3, 2), score=Dot().alibi(x(3))), ValueError, ["alibi(slopes) of shape (3,)", "one number a head"]),
    "sink is a list": (lambda: Dot().sink([0.0]), TypeError, ["sink(logits) must be a tensor", "got list"]),
    "sinks do not fit": (lambda: weights(x(1, 2, 3, 2), score=Dot().sink(x(5))), ValueError, ["sink(logits) of shape (5,)", "one number a head"]),
    "two sinks": (lambda: Dot().sink(x(1)).sink(x(1)), ValueError, ["has a sink already", "Add the logits up"]),
    "modify takes no function": (lambda: Dot().modify(3), TypeError, ["modify: a function was expected", "got int"]),
    "modify changes the shape": (lambda: weights(x(3, 2), score=Dot().modify(lambda s, i, j: s[..., :1])).lse(), ValueError, ["modify(f)", "must return scores of the shape", "got (1, 1, 3, 1)"]),
    "modify returns a number": (lambda: weights(x(3, 2), score=Dot().modify(lambda s, i, j: 0.0)).lse(), ValueError, ["modify(f)", "got float"]),
    "a similarity has the wrong shape": (lambda: weights(x(3, 2), score=lambda q, k: q).lse(), ValueError, ["a similarity f(q, k) must return scores (1, 1, 3, 3)", "q @ k.mT"]),
    "a similarity returns a number": (lambda: weights(x(3, 2), score=lambda q, k: 1).lse(), ValueError, ["a similarity f(q, k)", "got int"]),
    "a similarity is no function": (lambda: Similarity("dot"), TypeError, ["Similarity: a function was expected", "got str"]),
    "bilinear's weight is a list": (lambda: Bilinear([[1.0]]), TypeError, ["Bilinear(weight) must be a tensor"]),
    "bilinear's weight has one axis": (lambda: Bilinear(x(3)), ValueError, ["Bilinear(weight) must be (d, d′)", "shape (3,)"]),
    "bilinear's weight does not fit": (lambda: weights(x(3, 2), score=Bilinear(x(5, 2))), ValueError, ["Bilinear(weight) must be (2, 2)", "got (5, 2)"]),
    "bilinear's heads do not fit": (lambda: weights(x(1, 4, 3, 2), score=Bilinear(x(3, 2, 2))), ValueError, ["(4, 2, 2)", "got (3, 2, 2)"]),
    "additive's sizes differ": (lambda: Additive(x(2, 3), x(2, 4), x(3)), ValueError, ["must end in one size a", "'query_weight': 3", "'key_weight': 4"]),
    "additive's v is integer": (lambda: Additive(x(2, 3), x(2, 3), torch.tensor([1, 2, 3])), TypeError, ["Additive(v)", "torch.int64"]),
    "additive's weight has one axis": (lambda: Additive(x(3), x(2, 3), x(3)), ValueError, ["Additive(query_weight) must be (d, a)", "shape (3,)"]),
    "additive's weight does not fit": (lambda: weights(x(3, 2), x(3, 5), score=Additive(x(2, 3), x(2, 3), x(3))), ValueError, ["Additive(key_weight) must be (5, 3)", "got (2, 3)"]),
    # Masks.
    "mask is a number": (lambda: weights(x(3, 2), mask=1), TypeError, ["mask must be causal()", "got int"]),
    "mask is a name": (lambda: weights(x(3, 2), mask="causal"), TypeError, ["mask must be causal()", "got str"]),
    "mask is of floats": (lambda: weights(x(3, 2), mask=x(3, 3)), TypeError, ["a mask tensor must be bool", "torch.float32", ".bias(tensor)"]),
    "mask is of flags 0 and 1": (lambda: weights(x(3, 2), mask=x(3, 3, dtype=torch.int64)), TypeError, ["a mask tensor must be bool", "torch.int64", "mask.bool()", "padding(lengths)"]),
    "mask is a list": (lambda: weights(x(3, 2), mask=[3, 2]), TypeError, ["mask must be causal()", "got list", "torch.as_tensor(mask)", "padding(lengths)"]),
    "mask has one axis": (lambda: weights(x(3, 2), mask=x(3, dtype=torch.bool)), ValueError, ["(..., i, j)", "shape (3,)", "mask[None, :]"]),
    "mask does not broadcast": (lambda: weights(x(3, 2), mask=x(3, 5, dtype=torch.bool)), ValueError, ["mask of shape (3, 5)", "(1, 3, 3)"]),
    "mask is elsewhere": (lambda: weights(x(3, 2), mask=x(3, 3, dtype=torch.bool).to(META)), ValueError, ["mask is on meta", ".to(device)"]),
    "a mask function returns floats": (lambda: weights(x(3, 2), mask=lambda i, j: (i - j) * 1.0).lse(), TypeError, ["a mask function must return a bool tensor", "torch.float32", "j <= i"]),
    "a mask function returns a flag": (lambda: weights(x(3, 2), mask=lambda i, j: True).lse(), TypeError, ["a mask function must return a bool tensor", "got bool"]),
    "mask is a function that makes one": (lambda: weights(x(3, 2), mask=causal), TypeError, ["regard.causal is the function", "causal()"]),
    "mask is another such function": (lambda: weights(x(3, 2), mask=window), TypeError, ["regard.window is the function", "window(before, after)"]),
    "and with a number": (lambda: causal() & 1, TypeError, ["mask must be", "got int"]),
    "window is negative before": (lambda: window(-1, 0), ValueError, ["window(before=...)", "got -1", "window(0, 0)"]),
    "window is negative after": (lambda: window(0, -2), ValueError, ["window(after=...)", "got -2"]),
    "window is a fraction": (lambda: window(1.5, 0), ValueError, ["must be an int >= 0", "got 1.5"]),
    "lengths are fractions": (lambda: padding([1.5]), TypeError, ["padding(lengths) must be whole numbers", "torch.float32", ".long()"]),
    "lengths are flags": (lambda: padding(x(2, 3, dtype=torch.bool)), TypeError, ["takes one length a sequence", "flags of shape (2, 3)", "mask=flags.bool()[:, None, None, :]"]),
    "lengths are flags of 0 and 1": (lambda: weights(x(2, 1, 3, 2), mask=padding(x(2, 3, dtype=torch.int64))), ValueError, ["takes one length a sequence", "one number a key, (2, 3)", "mask=flags.bool()[:, None, None, :]"]),
    "a length is too long": (lambda: weights(x(1, 1, 3, 2), mask=padding([4])), ValueError, ["padding(lengths)", "between 0 and the 3 keys", "4"]),
    "a length is negative": (lambda: weights(x(2, 1, 3, 2), mask=padding([2, -1])), ValueError, ["padding(lengths)", "-1"]),
    "lengths do not fit the batch": (lambda: weights(x(2, 1, 3, 2), mask=padding([1, 2, 3])), ValueError, ["padding(lengths) of shape (3,)", "one length a sequence"]),
    "ids are bool": (lambda: documents(torch.tensor([True, False])), TypeError, ["documents(ids) must be whole numbers", "torch.bool"]),
    "ids do not fit": (lambda: weights(x(3, 2), mask=documents([0, 0])), ValueError, ["documents(ids) needs one id a position, 3", "got shape (2,)", "documents(ids, key_ids)"]),
    "key ids do not fit": (lambda: weights(x(3, 2), x(5, 2), mask=documents([0, 0, 1], [0, 1])), ValueError, ["documents(key_ids)", "5 on the last axis"]),
    "ids do not fit the batch": (lambda: weights(x(2, 1, 3, 2), mask=documents(torch.zeros(3, 3).long())), ValueError, ["documents(ids) of shape (3,)", "one row of ids a sequence"]),
    # Questions.
    "statistic is unknown": (lambda: weights(x(3, 2)).see("entropi"), ValueError, ["unknown statistic 'entropi'", "entropy", "received", "topk=k", "pool=(rows, cols)"]),
    "see is asked nothing": (lambda: weights(x(3, 2)).see(), ValueError, ["see() needs at least one statistic", "got none", "entropy", "values="]),
    "see's keyword is unknown": (lambda: weights(x(3, 2)).see(top=3), TypeError, ["top"]),
    "top of none": (lambda: weights(x(3, 2)).topk(0), ValueError, ["topk(k)", "at least 1", "got 0"]),
    "top of a fraction": (lambda: weights(x(3, 2)).topk(2.0), ValueError, ["topk(k)", "got 2.0"]),
    "pool of no rows": (lambda: weights(x(3, 2)).pool(0, 4), ValueError, ["pool(rows, ...)", "at least 1", "got 0"]),
    "pool of no columns": (lambda: weights(x(3, 2)).pool(4, -1), ValueError, ["pool(..., cols)", "got -1"]),
    "pool with a step": (lambda: weights(x(3, 2)).pool(1, 1, i=slice(0, 3, 2)), ValueError, ["pool(..., i=)", "without a step", "got slice(0, 3, 2)"]),
    "pool of a number": (lambda: weights(x(3, 2)).pool(1, 1, j=2), ValueError, ["pool(..., j=)", "got 2"]),
    "see's pool is a number": (lambda: weights(x(3, 2)).see(pool=64), ValueError, ["pool=(rows, cols)", "got 64"]),
    "mass of too far a key": (lambda: weights(x(3, 2)).mass(3), IndexError, ["index 3 is out of range", "3 positions"]),
    "mass of flags that do not fit": (lambda: weights(x(3, 2)).mass(x(4, dtype=torch.bool)), ValueError, ["one flag a key", "(3,)", "got (4,)"]),
    "mass of a word without labels": (lambda: weights(x(3, 2)).mass("cat"), (KeyError, IndexError), ["label"]),
    "seen was not asked": (lambda: weights(x(3, 2)).see("lse").entropy, AttributeError, ["'entropy' was not requested", "see('entropy')"]),
    "seen has no values": (lambda: weights(x(3, 2)).see("lse").y, AttributeError, ["'y' was not requested", "see(values=v)"]),
    "seen has no topk": (lambda: weights(x(3, 2)).see("lse").topk, AttributeError, ["'topk' was not requested", "see(topk=k)"]),
    "seen knows no such name": (lambda: weights(x(3, 2)).see("lse").entropi, AttributeError, ["no statistic is called 'entropi'", "here are lse"]),
    # Products.
    "values are a list": (lambda: weights(x(3, 2)) @ [1, 2, 3], TypeError, ["values must be a floating-point tensor", "got list"]),
    "values are integer": (lambda: weights(x(3, 2)) @ x(3, 2, dtype=torch.int64), TypeError, ["values must be", "torch.int64"]),
    "values do not fit": (lambda: weights(x(3, 2), x(5, 2)) @ x(3, 2), ValueError, ["values of shape (3, 2)", "5 positions"]),
    "values' heads do not divide": (lambda: weights(x(4, 3, 2)) @ x(3, 3, 2), ValueError, ["values have 3 heads and the weights 4", "transpose(1, 2)"]),
    "values' batch does not fit": (lambda: weights(x(2, 1, 3, 2)) @ x(3, 1, 3, 2), ValueError, ["batch axes", "(3,)", "(2,)"]),
    "values are elsewhere": (lambda: weights(x(3, 2)) @ x(3, 2).to(META), ValueError, ["values are on meta", "weights on cpu"]),
    "rows of u do not fit": (lambda: weights(x(3, 2), x(5, 2)).mT @ x(5, 2), ValueError, ["vectors of shape (5, 2)", "3 positions"]),
    "u has heads of keys": (lambda: weights(x(4, 3, 2), x(2, 3, 2)).mT @ x(2, 3, 2), ValueError, ["u has 2 heads and the weights 4", "one u a query head"]),
    "u @ W with a list": (lambda: [1.0] @ weights(x(3, 2)), TypeError, ["unsupported operand"]),
    # Brackets and words.
    "an index is too large": (lambda: weights(x(3, 2))[3], IndexError, ["index 3 is out of range for axis 0", "3 positions"]),
    "an index is too small": (lambda: weights(x(2, 3, 2))[0, 1, -4], IndexError, ["index -4 is out of range for axis 2"]),
    "a list holds too large an index": (lambda: weights(x(3, 2))[[0, 7]], IndexError, ["index 7 is out of range"]),
    "too many indices": (lambda: weights(x(3, 2))[0, 0, 0], IndexError, ["2 axes to index, (3, 3)", "got 3 indices"]),
    "two ellipses": (lambda: weights(x(3, 2))[..., ...], IndexError, ["one ellipsis", "got 2"]),
    "two lists": (lambda: weights(x(3, 2))[[0, 1], [0, 1]], IndexError, ["one axis", "got lists on 2", "second step"]),
    "a slice of words": (lambda: weights(x(3, 2)).label(list("abc"))["a":"c"], IndexError, ["whole numbers", "got 'a'", "Words are listed"]),
    "a slice of fractions": (lambda: weights(x(3, 2))[0.5:2], IndexError, ["whole numbers", "got 0.5"]),
    "a step of none": (lambda: weights(x(3, 2))[::0], IndexError, ["slices run forward", "got step 0"]),
    "a step backwards": (lambda: weights(x(3, 2))[::-1], IndexError, ["slices run forward"]),
    "an index is a fraction": (lambda: weights(x(3, 2))[1.0], IndexError, ["axis 0", "got float"]),
    "an index is a flag": (lambda: weights(x(3, 2))[True], IndexError, ["axis 0", "got bool"]),
    "a list holds flags": (lambda: weights(x(3, 2))[[True, False, True]], IndexError, ["got bool"]),
    "an index is a bool tensor": (lambda: weights(x(3, 2))[x(3, dtype=torch.bool)], IndexError, ["torch.bool", "nonzero"]),
    "an index is None": (lambda: weights(x(3, 2))[None], IndexError, ["got NoneType"]),
    "a word without labels": (lambda: weights(x(3, 2))["cat"], (KeyError, IndexError), ["W.label(tokens)"]),
    "a word that is not there": (lambda: words(3)["dog"], KeyError, ["no token 'dog'", "'the'", "'cat'"]),
    "a word that occurs twice": (lambda: words(3)["the"], KeyError, ["'the' occurs 2 times", "positions 0, 2", "'the:1' is the first"]),
    "a word that occurs less often": (lambda: words(3)[words(3).at("the", 3)], KeyError, ["'the' occurs 2 times", "occurrence 3"]),
    "occurrence zero": (lambda: words(3).at("the", 0), ValueError, ["counted from 1", "got 0"]),
    "at of a number": (lambda: words(3).at(3, 1), TypeError, ["the word must be a string", "got int"]),
    "a word for a head": (lambda: weights(x(4, 3, 2)).label(list("abc"))["a", :, :], IndexError, ["words name rows and columns"]),
    "labels are too few": (lambda: weights(x(3, 2)).label(["a", "b"]), ValueError, ["3 row positions need one token each", "got 2 row tokens"]),
    "column labels are too many": (lambda: weights(x(3, 2)).label(list("abc"), list("abcd")), ValueError, ["3 column positions need one token each", "got 4 column tokens"]),
    "an offset that is a word": (lambda: weights(x(3, 2)).offset_mass("a"), ValueError, ["offset_mass(offset) takes a whole number", "got 'a'"]),
    "a cover of blocks of no rows": (lambda: weights(x(3, 2)).cover(0.9, 0, 1), ValueError, ["cover(rows=...)", "got 0"]),
    "a function of tensors that has a counterpart": (lambda: torch.topk(weights(x(3, 2)), 2), TypeError, ["torch.topk takes tensors", "Use W.topk(k)"]),
    "one list for two lengths": (lambda: weights(x(3, 2), x(5, 2)).label(list("abc")), ValueError, ["3 rows and 5 columns", "label(row_tokens, column_tokens)"]),
    "labels are one string": (lambda: weights(x(3, 2)).label("abc"), TypeError, ["row tokens must be a list of strings", "got the string 'abc'"]),
    "labels are numbers": (lambda: weights(x(3, 2)).label(["a", 2, 3]), TypeError, ["row tokens must be a list of strings", "got int at position 1"]),
    # Weights written out.
    "dense would not fit": (lambda: weights(x(1, 1).expand(10_000_000, 1)).dense(), MemoryError, ["400 TB", "are free", "W.row(i)", "W.topk(k)"]),
    "blocks would not fit": (lambda: weights(x(1, 1).expand(10_000_000, 1)).cover(0.9, 1, 1), MemoryError, ["400 TB", "are free", "W.topk(k)"]),
    "a block would not fit": (lambda: weights(x(1, 1).expand(10_000_000, 1))[:, ::2], MemoryError, ["200 TB", "W.pool(64, 64)"]),
    "an eviction score of a tensor": (lambda: regard.kv.h2o(x(2, 3, 3)), TypeError, ["h2o(weights) takes a Weights", "seen[layer]", "got Tensor", "from_dense(w)"]),
    "a rollout of one layer": (lambda: regard.chains.rollout(words(), x(3, 2)), TypeError, ["a list of Weights, one a layer", "[W]"]),
    "a rollout of tensors": (lambda: regard.chains.rollout_rows([x(2, 3, 3)], [0]), TypeError, ["layer 0 of a rollout takes a Weights", "got Tensor"]),
    "patterns of heads together": (lambda: regard.patterns.classify(weights(x(2, 3, 2)).reduce_heads()), TypeError, ["classify(weights) takes a Weights", "got HeadReduction"]),
    "a picture of no patterns": (lambda: regard.look.draw_patterns("induction"), TypeError, ["regard.patterns.classify(W)", "got str"]),
    "a rollout of too few positions": (lambda: regard.chains.rollout([weights(x(2, 3, 2))], x(2, 2)), ValueError, ["(..., 3, e)", "got (2, 2)"]),
    "heads of one head": (lambda: words().reduce_heads(), ValueError, ["needs a head axis", "regard.weights(q[None], k[None])"]),
    "the largest weight of heads together": (lambda: weights(x(2, 3, 2)).reduce_heads().peak(), AttributeError, ["'HeadReduction' object has no attribute 'peak'", "R.topk(1)"]),
    "scores of heads together": (lambda: weights(x(2, 3, 2)).reduce_heads().lse(), AttributeError, ["no scores", "W.lse"]),
    "another device of heads together": (lambda: weights(x(2, 3, 2)).reduce_heads().to("cpu"), AttributeError, ["W.to(...).reduce_heads(...)"]),
    "no attribute of heads together": (lambda: weights(x(2, 3, 2)).reduce_heads().pek, AttributeError, ["has no attribute 'pek'"]),
    "vectors times heads together": (lambda: x(1, 3) @ weights(x(2, 3, 2)).reduce_heads(), TypeError, ["W.mT @ u", "R.received()"]),
    "QK-clip of a tensor": (lambda: regard.losses.qk_clip(x(4, 4), torch.nn.Linear(4, 4), x(2)), TypeError, ["qk_clip(query) takes an nn.Linear", "got Tensor"]),
    "QK-clip by a list": (lambda: regard.losses.qk_clip(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), [1.0]), TypeError, ["a tensor (h,)", "W.max_score().amax((0, 2))", "got list"]),
    "QK-clip of no heads": (lambda: regard.losses.qk_clip(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), x(0)), TypeError, ["a tensor (h,)", "got (0,)"]),
    "patterns of a tensor": (lambda: regard.patterns.classify([x(2, 3, 3)]), TypeError, ["classify(weights) takes a Weights", "got Tensor"]),
    "a loss of a tensor": (lambda: regard.losses.entropy_floor(x(2, 3, 3), 1.0), TypeError, ["entropy_floor(weights) takes a Weights", "got Tensor"]),
    "a drawing is misaligned": (lambda: causal().draw(3, align="strt"), ValueError, ['"start" or "end"', "got 'strt'"]),
    "Weights are made by hand": (lambda: Weights(x(3, 2), x(3, 2)), TypeError, ["regard.weights(q, k)", "Weights.from_dense(w)", "got Tensor"]),
    "given weights are a list": (lambda: Weights.from_dense([[1.0]]), TypeError, ["from_dense(w)", "got list"]),
    "given weights are integer": (lambda: Weights.from_dense(x(2, 2, dtype=torch.int64)), TypeError, ["from_dense(w)", "torch.int64"]),
    "given weights have one axis": (lambda: Weights.from_dense(x(3)), ValueError, ["from_dense(w)", "shape (3,)"]),
    "lse of given weights": (lambda: Weights.from_dense(x(2, 2) / 2).lse(), ValueError, ["lse needs scores", "from_dense"]),
    "max score of given weights": (lambda: Weights.from_dense(x(2, 2) / 2).max_score(), ValueError, ["max_score needs scores", "from_dense"]),
    "mean_distance of given weights": (lambda: Weights.from_dense(x(2, 3) / 3).mean_distance(), ValueError, ["mean_distance depends on positions"]),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_bad_input_is_told_what_it_got_and_what_to_do(row: str) -> None:
    call, error, parts = ROWS[row]
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value.args[0]) if caught.value.args else str(caught.value)
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"


def test_there_are_enough_rows() -> None:
    assert len(ROWS) >= 60


def test_nothing_is_half_done_by_a_refused_question() -> None:
    W = weights(x(3, 2))
    before = W.lse()
    for row in (lambda: W.topk(0), lambda: W.see("entropy", "nonsense"), lambda: W[9]):
        with pytest.raises((ValueError, IndexError)):
            row()
    assert torch.equal(W.lse(), before)


def test_messages_are_sentences() -> None:
    for name, (call, error, _) in ROWS.items():
        try:
            call()
        except error as caught:
            text = str(caught.args[0])
            if re.search("unexpected keyword|unsupported operand|has no attribute '\\w+'$", text):  # Python's own words
                continue
            assert re.search(r"[.?)]$", text.strip()), f"{name}: {text}"


def test_arguments_are_checked_before_any_work() -> None:
    called = []
    with pytest.raises(ValueError, match="align"):
        regard.attend(x(3, 2), x(5, 2), score=lambda q, k: called.append(1), mask=causal())
    assert not called
