"""Mutation tests: each planted bug is a small patch to the library that the ordinary tests must catch.

    python tests/support/planted.py            all of them; exits with 1 if one survives
    python tests/support/planted.py pool sink  those whose names hold one of these words
    python tests/support/planted.py --jobs 12  so many at once

Every patch is applied to a copy of the package, the tests named beside it run against the copy, and the copy is
restored. First the same tests run on the unpatched copy: a test that fails anyway catches nothing.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "regard"

#: What is run: the file below `tests`, and which of its tests (pytest's -k).
TESTS = {
    "merge": ("core/test_merge.py", ""),
    "statistics": ("core/test_statistics.py", "tiles and end and (scaled_dot or sink or bias) and not long_rows"),
    "ties": ("core/test_statistics.py", "equals"),
    "scores and sinks": ("core/test_statistics.py", "every_statistic and end and reference and (modifiers or alibi) and (causal or none)"),
    "identities": ("core/test_statistics.py", "not every_statistic"),
    "gradients": ("core/test_gradients.py", "tiles and every_answer and (scaled_dot or sink or alibi or additive) and (causal or padding or first)"),
    "result cache": ("core/test_gradients.py", "remembered or two_calls or in_place or after_backward"),
    "remembered": ("core/test_cached_results.py", "compiled and (one_pass or alone or any_pass)"),
    "remembered by plain tiles": ("core/test_cached_results.py", "plain and (one_pass or alone or any_pass)"),
    "masks": ("core/test_masks.py", ""),
    "mask functions": ("core/test_mask_functions.py", ""),
    "nodes": ("core/test_nodes.py", ""),
    "scores": ("core/test_scores.py", ""),
    "indexing": ("core/test_indexing.py", ""),
    "array protocol": ("core/test_array_protocol.py", "not compiled and not image"),
    "tensor kinds": ("core/test_tensor_kinds.py", "negated or forward_mode or (jit and (entropy or layer))"),
    "pooled part": ("core/test_statistics.py", "pooled_map"),
    "edges": ("core/test_empty_and_infinite.py", "float64 and tiles"),
    "edges: rows of nan": ("core/test_empty_and_infinite.py", "no_gradient_to"),
    "row weights": ("core/test_row_weights.py", "whatever_way and (100 or 1000) and (sink or tensor)"),
    "row weights: rows chosen twice": ("core/test_row_weights.py", "whatever_way and compiled-bias-10"),
    "row weights: heads": ("core/test_row_weights.py", "mean_of_heads"),
    "row weights: intervals": ("core/test_row_weights.py", "whatever_way and compiled-window"),
    "gradients of cells": ("core/test_row_weights.py", "gradients_of_cells and -1] and (scaled or tensor)"),
    "bound": ("core/test_bound.py", "within_its_bound and not 20000 and (0 or 5)"),
    "gradients in float32": ("core/test_bound.py", "three_times and dtype0"),
    "compiled tiles": ("engines/test_numba_tiles.py", ""),
    "strips": ("engines/test_numba_strips.py", ""),
    "inputs": ("core/test_inputs.py", "not compiled and not forked and not spawned"),
    "errors": ("core/test_errors.py", ""),
    "replay": ("engines/test_replay.py", ""),
    "tiles in Triton": ("engines/test_triton_interpreted.py", "tiles"),
    "segments": ("core/test_segments.py", ""),
    "networks": ("engines/test_topk_networks.py", ""),
    "comparison": ("core/test_comparison.py", "not learn and (not formula or scaled_dot or sink)"),
    "fused rows": ("core/test_fused_rows.py", "not tiles_are"),
    "heads together in the interpreter": ("engines/test_triton_interpreted.py", "heads_together"),
    "indexers": ("engines/test_triton_interpreted.py", "indexers"),
    "fused rows: tiles": ("core/test_fused_rows.py", "tiles_are and (window or blocks)"),
    "spans": ("core/test_spans.py", ""),
    "row statistics": ("core/test_row_stats.py", ""),
    "kv": ("core/test_kv.py", ""),
    "losses": ("core/test_losses.py", ""),
    "patterns": ("core/test_patterns.py", ""),
    "chains": ("core/test_chains.py", ""),
    "layouts": ("core/test_inputs.py", "lies_as or lies_in_no_order"),
    "from_pretrained": ("nn/test_nn_pretrained.py", "last_hidden_state or logits"),
    "attention dropout": ("nn/test_nn_dropout.py", "dense_matrix or share"),
    "ranks": ("distributed/test_ranks.py", "every_answer and not (1-contiguous or 1-uneven or 1-empty or 1-zigzag)"),
    "ranks: gradients": ("distributed/test_ranks.py", "gradients_are"),
    "ranks: faults": ("distributed/test_faults.py", "disagree or raises or dies"),
    "ranks: functions": ("distributed/test_ranks.py", "functions_of_positions"),
    "ranks: dtensors": ("distributed/test_dtensors.py", ""),
    "two recordings": ("look/test_look_compare.py", "distances or outcome or nearest or tokenizers"),
    "sizes of pictures": ("look/test_look_export.py", "its_width or passes_through"),
    "patches": ("look/test_look_images.py", "become_patches or same_pixels"),
    "maps of long inputs": ("look/test_look_map.py", "largest_weight_of or are_exact or sixteen"),
    "bands of long inputs": ("look/test_look_bands.py", "bands_give or without_keys"),
    "served tiles": ("look/test_serve.py", "every_level or tiles_rows or without_keys"),
    "hostile requests": ("look/test_serve.py", "hostile_request_gets or opens_the_page_once"),
    "distances": ("core/test_scores.py", "gaussian_errors"),
    "unannounced attention": ("recorder/test_record_unannounced.py", "recorded_right or without_a_batch or refused_by_name or dropout"),
    "generations": ("recorder/test_record_generate.py", "assisted"),
    "recorded gradients": ("recorder/test_record_grad.py", "reaches or learned_bias or says_what"),
    "data-parallel": ("learn/test_learn_parallel.py", ""),
    "cost": ("distributed/test_cost.py", ""),
    "corpus": ("corpora/test_corpus.py", "not ranks and not rank_that"),
    "corpus: passes": ("corpora/test_corpus_transformers.py", "one_pass"),
    "corpus: host": ("corpora/test_host_syncs.py", ""),
    "transformers on regard": ("integrations/test_transformers_on_regard.py", "bias_in or changes or checkpoints or its_own or causality"),
    "interrupted recordings": ("recorder/test_record_hooks.py", "record and any_line"),
}  # fmt: skip


class Bug(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


BUGS = [
    # integrations/transformers.py.
    Bug("every model takes the masks of SDPA", "integrations/transformers.py", "return (sdpa_mask if takes_sdpa_masks else eager_mask)", "return sdpa_mask", ("transformers on regard",)),
    Bug("a layer without a word is causal", "integrations/transformers.py", "causal = _takes_sdpa_masks(type(module).__module__, encoder_decoder)", "causal = True", ("transformers on regard",)),
    Bug("a bias that learns is read without its graph", "integrations/transformers.py", "return mask.requires_grad or torch.compiler", "return torch.compiler", ("transformers on regard",)),
    Bug("a mask that changed is not parsed anew", "integrations/transformers.py", "if previous != form:", "if previous is None:", ("transformers on regard",)),
    Bug("a checkpoint computes other statistics again", "integrations/transformers.py", "return _requested.get(module, ()), None", "return (), None", ("transformers on regard",)),
    # learn/parallel.py.
    Bug("processes take the mean of their losses", "learn/parallel.py", "(part, share * self.size, n == count - 1)", "(part, share, n == count - 1)", ("data-parallel",)),
    Bug("every process takes the first parts", "learn/parallel.py", "own = parts[self.rank * count : (self.rank + 1) * count]", "own = parts[:count]", ("data-parallel",)),
    # distributed/cost.py.
    Bug("a window is counted on one side", "distributed/cost.py", "return n + side(band[0]) + side(band[1])", "return n + side(band[0])", ("cost",)),
    Bug("sums come with the keys that came", "distributed/cost.py", "share.incoming * p.key_bytes + share.outgoing * p.sum_bytes", "share.incoming * (p.key_bytes + p.sum_bytes)", ("cost",)),
    Bug("the next piece sets out when this one is done", "distributed/cost.py", "sent = 0.0 if n == 0 else began", "sent = 0.0 if n == 0 else done", ("cost",)),
    Bug("the last piece travels while the one before arrives", "distributed/cost.py", "max(done or own, began + last[1]) + last[0]", "max(done or own, last[1]) + last[0]", ("cost",)),
    Bug("a key is seen by its own rank alone", "distributed/cost_split.py", "return cuts + (full - above) * shift + (len(parts) - full) * most", "return cuts + (full - above) * shift", ("cost",)),
    # corpora: sums over documents.
    Bug("a carry is lost", "corpora/exact.py", "total[..., n + 1] += total[..., n] >> BITS", "total[..., n + 1] += 0", ("corpus",)),
    Bug("diagonals are read one place off", "corpora/profile.py", "[..., 1 : r + n].flip(-1)", "[..., 0 : r + n - 1].flip(-1)", ("corpus",)),
    Bug("distances are not squared", "corpora/profile.py", "weighted * distances,", "weighted,", ("corpus",)),
    Bug("the previous token is the next one", "corpora/profile.py", "diagonals[..., max(t - 2, 0) : t - 1]", "diagonals[..., t : t + 1]", ("corpus",)),
    Bug("the first row looks at the first token", "corpora/profile.py", '"first": first[..., 1:]', '"first": first', ("corpus",)),
    Bug("a compiled row begins where the row above it does on its diagonals", "engines/numba/kernels/profile.py", "size * (rows - 1 - r + a)", "size * (rows - 1 + a)", ("corpus",)),
    Bug("a compiled example is the query itself", "engines/numba/kernels/profile.py", "w[i - key] = f32(0)", "w[i - key] = w[i - key]", ("corpus",)),
    Bug("a strong row is passed over in the search for examples", "engines/numba/kernels/profile.py", "if share < best[0]:", "if share > best[0]:", ("corpus",)),
    Bug("numbers come to the host layer by layer", "corpora/run.py", "sent_to_host([profile(layer.weights, on_device) for", "sent_to_host([sent_to_host([profile(layer.weights, on_device)])()[0] for", ("corpus: host",)),
    Bug("a GPU waits for the sums of every pass", "corpora/run.py", "yield from finished(1)", "yield from finished(0)", ("corpus: host",)),
    Bug("a recording adopts no results of the pass", "recorder/calls.py", "recorded._adopt(self.row_results)", "recorded._adopt({})", ("corpus: passes",)),
    Bug("an example is the query itself", "corpora/profile.py", "(part.block.i == part.block.j) | (part.block.j == 0)", "part.block.j == 0", ("corpus",)),
    Bug("a variance without its mean", "corpora/result.py", "square - mean * mean", "square - mean", ("corpus",)),
    Bug("the last example of a document, not its strongest", "corpora/tally.py", "if tie.document not in best or", "if (tie.document, tie.start) not in best or", ("corpus",)),
    Bug("a run in training mode", "corpora/run.py", "    module.eval()\n", "    module.train(module.training)\n", ("corpus",)),
    Bug("text in a redacted run", "corpora/run.py", "None if redact else [", "[", ("corpus",)),
    Bug("a part is written as it comes", "corpora/folder.py", "atomic_write(path, [json", "path.write_bytes(*[json", ("corpus",)),
    Bug("other data continue a run", "corpora/folder.py", "if old.get(name) != value:", "if old.get(name) != value and name != 'checksum':", ("corpus",)),
    # core/online_softmax.py: the merge.
    Bug("merge forgets to rescale its own sum", "core/online_softmax.py", "l=a * self.l + b * other.l", "l=self.l + b * other.l", ("merge",)),
    Bug("merge shifts the entropy's sum the wrong way", "core/online_softmax.py", "t = a * (self.t + ours * self.l)", "t = a * (self.t - ours * self.l)", ("merge",)),
    Bug("merge pivots on −inf", "core/online_softmax.py", "return torch.where(old == -torch.inf, 0, old - new)", "return old - new", ("merge",)),
    Bug("a block pivots on −inf", "core/online_softmax.py", "return torch.where(m == -torch.inf, 0, m)", "return m", ("merge",)),
    Bug("ties go to the higher index", "core/online_softmax.py", "tie = (self.m == other.m) & _before(self.argmax, other.argmax)", "tie = (self.m == other.m) & _before(other.argmax, self.argmax)", ("merge",)),
    Bug("top merges by score alone", "core/online_softmax.py", "score, index = score.gather(-1, by_index), index.gather(-1, by_index)", "pass", ("merge",)),
    Bug("a sink is the maximum", "core/online_softmax.py", '"max_score": self.m,', '"max_score": total.m,', ("merge",)),
    Bug("a row with no key divides by zero", "core/online_softmax.py", "share = torch.where(l == 0, 0, 1 / l)", "share = 1 / l", ("merge",)),
    Bug("−0.0 sorts below 0.0", "core/online_softmax.py", "bits = (s.detach() + 0.0).contiguous()", "bits = s.detach().contiguous()", ("ties",)),
    # core/stats.py: definitions, and the tiles of the pooled map.
    Bug("lse in base 2", "core/stats.py", "return (m + l.log()).to(norm.dtype)", "return (m + l.log2()).to(norm.dtype)", ("merge",)),
    Bug("tiles begin one late", "core/stats.py", "return ((position + 1) * tiles - 1) // max(n, 1)", "return (position * tiles) // max(n, 1)", ("identities",)),
    Bug("pooled map ignores where its part begins", "core/stats.py", "return _tile_of(j - self.j0, self.cols, self.j1 - self.j0)", "return _tile_of(j, self.cols, self.j1)", ("identities",)),
    Bug("the reference counts a sink's share twice", "core/stats.py", "entropy(w) + entropy(sink.unsqueeze(-1))", "entropy(w) + 2 * entropy(sink.unsqueeze(-1))", ("scores and sinks",)),
    # core/masks/kinds.py, core/masks/algebra.py, core/masks/intervals.py and core/masks/lowering.py.
    Bug("causal hides the query itself", "core/masks/kinds.py", "return band(geometry, None, 0)", "return band(geometry, None, -1)", ("masks",)),
    Bug("a window ends one early", "core/masks/kinds.py", "return band(geometry, self.before, self.after)", "return band(geometry, self.before, self.after - 1)", ("masks",)),
    Bug("the complement forgets what is before the first interval", "core/masks/intervals.py", "torch.cat([edge, self.hi], 1)", "torch.cat([self.hi[:, :1], self.hi], 1)", ("masks",)),
    Bug("documents out of order are called exact", "core/masks/kinds.py", "exact = trusted or bool((hi - lo == end - begin).all())", "exact = True", ("masks",)),
    Bug("a mask's cache outlives a change of its tensors", "core/masks/intervals.py", "    if cached_state != state:\n", "    if cached_state is None:\n", ("masks",)),
    Bug("a mask's cache travels with a copy", "core/masks/algebra.py", "return {name: getattr(self, name) for name in self.parts} if is_node(self) else vars(self)", "return vars(self)", ("masks",)),
    Bug("a few rows see the keys that all rows see", "core/masks/lowering.py", "keys_seen = intervals.visible_keys(self.keys)[:, None, None]", "keys_seen = self.keys_seen", ("masks",)),
    Bug("either of two masks shows a query itself, so both do", "core/masks/algebra.py", "return self.left.sees_itself and self.right.sees_itself", "return True", ("masks",)),
    Bug("one of several intervals is taken for all", "core/masks/lowering.py", "for r in range(lo.shape[-1])]", "for r in range(1)]", ("masks",)),
    Bug("cells of a function are counted from the first key of their strip", "core/masks/lowering.py", "changes.nonzero()[:, -1] + keys.start", "changes.nonzero()[:, -1]", ("mask functions",)),
    Bug("functions show the cells of the first heads to all", "core/masks/selection.py", "cells.index_select(axis, numbers.flatten())", "cells.narrow(axis, 0, numbers.numel())", ("mask functions",)),
    Bug("an empty interval stands before the others", "core/masks/lowering.py", "edges.cummax(-1).values.mT", "edges.mT", ("mask functions",)),
    Bug("a subclass inherits which cells its parent shows", "core/masks/algebra.py", "if name not in vars(cls):", "if False:", ("mask functions",)),
    Bug("a cell of a function has the norm of other tiles", "engines/__init__.py", "    if problem.mask is not None and problem.mask.dense_parts() is None:\n        return False\n", "", ("mask functions",)),
    Bug("inexact intervals are complemented", "core/masks/algebra.py", "return intervals.complement(geometry.keys) if intervals.exact else super().intervals(geometry)", "return intervals.complement(geometry.keys)", ("masks",)),
    # core/api.py.
    Bug("align end counts from the wrong corner", "core/api.py", "        return j - i\n", "        return i - j\n", ("scores and sinks", "masks")),
    Bug("two bands show the wider one", "core/masks/algebra.py", "else min(a, b)", "else max(a, b)", ("nodes",)),
    Bug("a mask of one's own inherits a band", "core/masks/algebra.py", '"sees_itself", "band", "dense_parts"]', '"sees_itself", "dense_parts"]', ("nodes",)),
    # core/scores/kinds.py, core/scores/base.py, core/scores/modifiers.py and core/broadcast.py.
    Bug("a score of one's own inherits the scale of a product", "core/scores/base.py", 'if "lower" in vars(cls) and', 'if "lowered" in vars(cls) and', ("nodes",)),
    Bug("a part of a matrix has the bias of another", "core/scores/modifiers.py", "return tree_map(self, lambda t: take(take(t, -2, rows), -1, cols))", "return tree_map(self, lambda t: take(take(t, -2, slice(0, rows.stop - rows.start)), -1, cols))", ("nodes",)),
    Bug("a Gaussian is shown with σ for σ²", "core/scores/kinds.py", "-product / (2 * self.sigma**2), f", "-product / (2 * self.sigma), f", ("nodes",)),
    Bug("scaled by d, not its root", "core/scores/kinds.py", "return 1 / math.sqrt(max(operator.index(size), 1)) if self.scale is None else float(self.scale)", "return 1 / max(size, 1) if self.scale is None else float(self.scale)", ("scores",)),
    Bug("near keys are left to products that cancel", "core/scores/similarity.py", "near = (s > -NEAR * squared) &", "near = (s > 0 * squared) &", ("distances",)),
    Bug("numba: near keys are left to products that cancel", "engines/numba/kernels/row_ops.py", "limit = -near * squared", "limit = squared", ("distances",)),
    Bug("a Gaussian's origin is rounded", "core/scores/kinds.py", "torch.where((high - centre <= reach) & (centre - low <= reach), centre, 0)", "centre", ("distances",)),
    Bug("a Gaussian without its key's length", "core/scores/similarity.py", "repeat_kv(key.unsqueeze(-2), q.shape[-3])", "repeat_kv(0 * key.unsqueeze(-2), q.shape[-3])", ("scores",)),
    Bug("a Gaussian's gradient without that of its lengths", "core/scores/similarity.py", "return dq - 2 * self.distance_scale * q * row, dk", "return dq, dk", ("scores",)),
    Bug("a soft cap that forgets to multiply back", "core/scores/modifiers.py", "return self.cap * torch.tanh(s / self.cap)", "return torch.tanh(s / self.cap)", ("scores",)),
    Bug("alibi signed", "core/scores/modifiers.py", "(block.i - block.j).abs()\n", "(block.i - block.j)\n", ("scores",)),
    Bug("modifiers in the opposite order", "core/scores/base.py", "modifiers=(*self.modifiers, modifier))", "modifiers=(modifier, *self.modifiers))", ("scores",)),
    Bug("heads of a group in the wrong order", "core/broadcast.py", "x.repeat_interleave(heads // x.shape[-3], -3)", "x.repeat(*[1] * (x.ndim - 3), heads // x.shape[-3], 1, 1)", ("inputs",)),
    # core/problem.py.
    Bug("a chosen head looks at the keys of another", "core/problem.py", "[head // per_key_head for head in chosen]", "[head % k.shape[-3] for head in chosen]", ("indexing",)),
    Bug("a narrowed problem forgets its offset", "core/problem.py", "            offset=self.offset + start,\n", "            offset=self.offset,\n", ("indexing",)),
    Bug("poison in keys is let through", "core/problem.py", "k=self.blank(self.k, visible, -2), modifiers=modifiers)", "modifiers=modifiers)", ("edges",)),
    Bug("poison in keys is let through that another head sees", "core/problem.py", "visible = visible | cells.any(2)  # not", "visible = visible | cells.any(2).any(1, keepdim=True)  # not", ("edges",)),
    Bug("poison in values is let through", "core/problem.py", "v = None if request.v is None else zero_keys(request.v, visible, -2)", "v = request.v", ("edges",)),
    Bug("a group's gradients are averaged", "core/problem.py", "x.unflatten(1, (heads, -1)).sum(2)", "x.unflatten(1, (heads, -1)).mean(2)", ("gradients",)),
    # engines/blockwise.py and engines/score_grad.py: plain tiles.
    Bug("a tile at the edge counts as all visible", "engines/blockwise.py", "full_from <= j and stop <= full_to", "full_from <= j", ("masks",)),
    Bug("the last tile of keys is not visited", "engines/blockwise.py", "for j in range(first, end, width):", "for j in range(first, end - 1, width):", ("masks",)),
    Bug("ranges that overlap are visited twice", "engines/blockwise.py", "if out and first <= out[-1][1]:", "if out and first < out[-1][0]:", ("masks",)),
    Bug("received keeps the last tile only", "engines/blockwise.py", 'total["received"][:, :, cols] += w.sum(2)', 'total["received"][:, :, cols] = w.sum(2)', ("statistics",)),
    Bug("the sink gets no gradient", "engines/blockwise.py", "total.sink.add_(gradient.of_sink(problem.sink, norm))", "pass", ("gradients",)),
    Bug("the gradient of the entropy lacks its log", "engines/score_grad.py", "return inside - self.d_entropy[:, :, rows, None] * log_w.clamp(min=-1e5)", "return inside - self.d_entropy[:, :, rows, None]", ("gradients",)),
    Bug("recomputed weights pivot on −inf", "engines/score_grad.py", "above = s - torch.where(m == -torch.inf, 0, m)", "above = s - m", ("edges",)),
    Bug("m and log l become one number", "engines/score_grad.py", "w = above.exp() / l", "w = (s - (m + l.log())).exp()", ("edges",)),
    Bug("a row of nan gives hidden keys a gradient", "engines/blockwise.py", "ds if all_visible else ds.masked_fill(s == -torch.inf, 0)", "ds", ("edges: rows of nan",)),
    Bug("a hidden cell is nan in a row that is nan", "engines/score_grad.py", "return w if all_visible else w.masked_fill(s == -torch.inf, 0), above - l.log()", "return w, above - l.log()", ("edges: rows of nan",)),
    # core/evaluation.py: a weight and the norm of its row come from one product.
    Bug("cells: the norm comes from another product", "core/evaluation.py", "results = compute_with_autograd(problem.narrow(run.start, run.stop), local, engine, {}, requires_grad)", 'results = compute_with_autograd(problem.narrow(run.start, run.stop), local, engine, {}, requires_grad) | {"norm": compute_with_autograd(problem, Request(("norm",)), engine, {}, requires_grad)["norm"][:, :, run.start : run.stop]}', ("row weights",)),
    Bug("cells: complete rows take the norm of the tiles", "core/evaluation.py", "w = without_autocast(problem.q, lambda: softmax(exact.scores(block), exact.sink)[0].to(self.dtype))", 'w = weights_from_norm(problem.scores(block), compute_with_autograd(problem, Request(("norm",)), engine, {}, False)["norm"][:, :, as_index(rows, self.device)], False)[0]', ("row weights",)),
    Bug("cells: complete rows leave the sink out", "core/evaluation.py", "softmax(exact.scores(block), exact.sink)[0]", "softmax(exact.scores(block), None)[0]", ("row weights",)),
    Bug("cells: the cached norm is that of other rows", "core/evaluation.py", 'results["norm"][:, :, request.rows]', 'results["norm"][:, :, : len(rows)]', ("row weights",)),
    Bug("cells: a row of −inf is nan in its gradient", "core/stats.py", "every.masked_fill(hidden.all(-1, keepdim=True), 0)).softmax(-1)", "every).softmax(-1)", ("edges",)),
    Bug("cells: hidden ones are nan in a row that is nan", "core/stats.py", "p = p.masked_fill_(hidden, 0) if in_place else", "p = p if in_place else", ("edges",)),
    Bug("cells: a long row is added up in one running sum a lane", "core/stats.py", "p = p.div_(total) if in_place else p / total", "pass", ("row weights",)),
    Bug("cells: their scores get no gradient", "core/autograd.py", 'more.append(cell_grads(problem, request, results["cells"], grad_outputs["cells"]))', "pass", ("gradients of cells",)),
    Bug("cells: hidden ones get a gradient", "core/autograd.py", "bare_scores(block), g.masked_fill(hidden, 0)", "bare_scores(block), torch.ones_like(g)", ("gradients of cells",)),
    # core/autograd.py: the one backward.
    Bug("the gradient of the norm has the wrong sign", "core/autograd.py", "delta = delta - g[..., 0]", "delta = delta + g[..., 0]", ("gradients",)),
    Bug("the gradient of the output lacks its row term", "core/autograd.py", 'engine.row_dot(g, results["y"])', 'engine.row_dot(g, results["y"]) * 0', ("gradients",)),
    Bug("the gradient of received lacks its row term", "core/autograd.py", "delta = delta + (left * mixed).sum(-1)", "delta = delta + 0", ("gradients",)),
    Bug("the gradient of the mean distance lacks its row term", "core/autograd.py", 'delta = delta + d_distance * results["mean_distance"]', "delta = delta + 0", ("gradients",)),
    # core/result_cache.py and core/indexing.py.
    Bug("cache: a change of a factor is not noticed", "core/result_cache.py", "or self._versions != versions_of(factors):", "or False:", ("result cache",)),
    Bug("cache: a result changed in place is returned", "core/result_cache.py", "if result is not None and result._version == version:", "if result is not None:", ("result cache",)),
    Bug("checks: kept for another mask", "core/api.py", "q.device, k.device, score, mask, align, engine\n", "q.device, k.device, score, align, engine\n", ("inputs",)),
    Bug("checks: kept for another score", "core/api.py", "q.device, k.device, score, mask, align, engine\n", "q.device, k.device, mask, align, engine\n", ("inputs",)),
    Bug("checks: kept for other positions", "core/api.py", "q.device, k.device, score, mask, align, engine\n", "q.device, k.device, score, mask, engine\n", ("inputs",)),
    Bug("checks: kept under autocast", "core/api.py", " or torch.is_autocast_enabled(q.device.type):\n        return None\n    if not isinstance(score", ":\n        return None\n    if not isinstance(score", ("inputs",)),
    Bug("networks: a pair is not compared", "engines/triton/kernels/topk_network.py", "for i in range(min(k, n - j - k)):", "for i in range(min(k, n - j - k) - (k > 2)):", ("networks",)),
    Bug("networks: columns in the order of keys", "engines/triton/kernels/topk_network.py", "1 << bits - 1 - bit for bit", "1 << bit for bit", ("networks",)),
    Bug("cache: a tensor of inference mode is put there", "core/result_cache.py", "= result.detach(), result._version", "= result.detach(), 0 if result.is_inference() else result._version", ("result cache",)),
    Bug("remembered: every pass counts as the first", "core/autograd.py", 'if remember and "norm" not in cached:', "if remember:", ("remembered",)),
    Bug("remembered: lse takes a pass of its own", "core/autograd.py", 'results["lse"] = lse_of(cached["norm"])', "pass", ("remembered by plain tiles",)),
    Bug("remembered: the norm is not looked up for columns", "core/result_cache.py", 'for name in ("norm", *request.names, *OPTIONAL_OUTPUTS):', "for name in (*request.names, *OPTIONAL_OUTPUTS):", ("remembered",)),
    Bug("cache: the key of the largest lacks their number", "core/result_cache.py", "return name, request.topk", "return name", ("ties",)),
    Bug("cache: the key of a pooled map lacks its tiles", "core/result_cache.py", "return name, *vars(request.tiling).values()", "return name", ("result cache",)),
    Bug("a word that occurs twice is its first", "core/indexing.py", "            if len(places) > 1:\n", "            if len(places) > 99:\n", ("errors",)),
    Bug("negative numbers count from the wrong end", "core/indexing.py", "return n % size if size else n", "return abs(n) % size if size else n", ("indexing",)),
    # Memory layouts, in a graph and outside it.
    Bug("layouts: the stride of a single head counts", "core/problem.py", "if several and x.stride(1) <", "if x.stride(1) <", ("layouts",)),
    Bug("layouts: an operator returns another one than its fake", "core/autograd.py", "return _empty_in_layout(x, result.shape, result.dtype).copy_(result)", "return result", ("layouts",)),
    # core/rows/strips.py and core/rows/comparison.py: complete rows, and two matrices side by side.
    Bug("heads: a recorded question computes the norm again", "core/rows/head_reduction.py", "with_norm._norm = norm", "pass", ("replay",)),
    Bug("triton heads: gradients are not centred", "engines/triton/kernels/head_rows_backward.py", "ds = w * (x - centre[:, None]) * slope", "ds = w * x * slope", ("heads together in the interpreter",)),
    Bug("triton heads: gradients of keys from the last strip alone", "engines/triton/head_rows_pass.py", '"ADD": rows.start > 0', '"ADD": False', ("heads together in the interpreter",)),
    Bug("triton heads: a sum is not divided", "engines/triton/kernels/head_rows.py", "x = x / total", "x = x", ("heads together in the interpreter",)),
    Bug("triton heads: tiles are not divided", "engines/triton/kernels/head_rows.py", "p = tl.div_rn(p, tl.where(total == 0.0, 1.0, total))", "p = p", ("heads together in the interpreter",)),
    Bug("triton heads: a sink's share is no outcome", "engines/triton/kernels/head_rows.py", "x += p * (tl.log2(total)", "x += 0.0 * p * (tl.log2(total)", ("heads together in the interpreter",)),
    Bug("triton heads: the first head's mask for all", "engines/triton/head_rows_pass.py", "p.mask_format.arg.flags_h != 0", "False", ("heads together in the interpreter",)),
    Bug("triton heads: the norm of the head before", "engines/triton/kernels/head_rows.py", "tl.minimum(h + 1, sizes.h - 1)", "tl.minimum(h, sizes.h - 1)", ("heads together in the interpreter",)),
    Bug("triton heads: key blocks are counted by every program", "engines/triton/kernels/head_rows.py", "for n in range(first + split, past, splits):", "for n in range(first + split, past):", ("heads together in the interpreter",)),
    Bug("strips: a row with no key pivots on −inf", "core/rows/sources.py", "self._pivot = torch.where(m == -torch.inf, 0, m)", "self._pivot = m", ("comparison",)),
    Bug("strips: the sink takes no weight", "core/rows/sources.py", "l = l + self._sink_above.exp()", "pass", ("comparison",)),
    Bug("strips: heads look at the keys of another group", "core/rows/sources.py", "of_keys = slice(heads.start // per_key_head, -(-heads.stop // per_key_head))", "of_keys = slice(heads.start % g, heads.start % g + max(1, (heads.stop - heads.start) // per_key_head))", ("comparison",)),
    Bug("strips: the second matrix takes positions of the first", "core/rows/sources.py", "s = self.problem.bare_scores(self.problem.block(part.rows, part.cols))", "s = self.problem.bare_scores(part.block)", ("comparison",)),
    Bug("strips: keys that only the second matrix sees are left out", "core/rows/strips.py", "torch.stack([z for _, z in hulls]).amax(0)", "hulls[0][1]", ("comparison",)),
    Bug("strips: gradients of the last strip alone", "core/rows/strips.py", "            z += g\n", "            z.copy_(g)\n", ("comparison",)),
    Bug("comparison: cross-entropy of the wrong side", "core/rows/comparison.py", "-(x.p * x.where_both(x.log_q, 0))", "-(x.q * x.where_both(x.log_p, 0))", ("comparison",)),
    Bug("comparison: a forbidden key is passed over", "core/rows/comparison.py", "return x.infinite((x.p * x.log_ratio).sum(-1))", "return (x.p * x.log_ratio).sum(-1)", ("comparison",)),
    Bug("comparison: the log-ratio of a hidden key is nan", "core/rows/comparison.py", "return x if self.both is None else torch.where(self.both, x, other)", "return x", ("comparison",)),
    Bug("comparison: a key of one side alone is left out of js", "core/rows/comparison.py", "of_q = x.q * x.where_both(log2 - softplus(ratio), log2)", "of_q = x.q * x.where_both(log2 - softplus(ratio), 0)", ("comparison",)),
    Bug("comparison: the sink is no outcome", "core/rows/comparison.py", "if p.log_sink is not None or q.log_sink is not None:", "if False:", ("comparison",)),
    Bug("compiled comparison: the maximum of the second moves alone", "engines/numba/kernels/comparison.py", "(entropy * shift - shift2) * state[1]", "entropy * shift * state[1]", ("fused rows",)),
    Bug("compiled comparison: a forbidden key is passed over", "engines/numba/kernels/comparison.py", "    state[5] += forbidden\n", "", ("fused rows",)),
    Bug("compiled comparison: keys that only the second sees are left out", "engines/numba/kernels/comparison.py", "_, _, a, z = visible_keys(S, b, n, i0, rows)", "_, _, a, z = visible_keys(T, b, 0, i0, rows)", ("fused rows",)),
    Bug("compiled comparison: the gradient is not centred", "engines/numba/kernels/comparison.py", "a[j] = g * (a[j] - p[j] * delta)", "a[j] = g * a[j]", ("fused rows",)),
    Bug("compiled comparison: kl by the other side", "engines/numba/kernels/comparison.py", "        s2[j] = -w\n", "        s2[j] = -p2[j]\n", ("fused rows",)),
    Bug("compiled comparison: js of the sum, not the mean", "engines/numba/kernels/comparison.py", "middle = f32(2) / max(p[j] + q[j], tiny)", "middle = f32(1) / max(p[j] + q[j], tiny)", ("fused rows",)),
    Bug("compiled comparison: equal weights overlap twice", "engines/numba/kernels/comparison.py", "b[j] = q[j] * (f32(1) - share)", "b[j] = q[j] * (f32(1) if p[j] == q[j] else f32(1) - share)", ("fused rows",)),
    Bug("compiled comparison: total variation has one sign", "engines/numba/kernels/comparison.py", "b[j] = -q[j] * sign", "b[j] = q[j] * sign", ("fused rows",)),
    Bug("compiled comparison: the nan of a row reaches hidden keys", "engines/numba/kernels/comparison.py", "            grads[j] = f32(0)\n", "            pass\n", ("fused rows",)),
    Bug("compiled comparison: infinite rows have a gradient", "core/rows/fused.py", "grad = grad.masked_fill(value == torch.inf, 0)", "pass", ("fused rows",)),
    Bug("compiled heads: a head's share is left out", "engines/numba/kernels/head_rows.py", "normalize_and_accumulate_(s, z - a, m, share * factor,", "normalize_and_accumulate_(s, z - a, m, share,", ("fused rows",)),
    Bug("compiled heads: the other's maximum moves alone", "engines/numba/kernels/head_rows.py", "state[2] += t - shift * state[3]", "state[2] += t", ("fused rows",)),
    Bug("compiled heads: rows are not divided by their sum", "engines/numba/kernels/head_rows.py", "(f32(0) if T.measure == CROSS_ENTROPY else np.log(total))", "f32(0)", ("fused rows",)),
    Bug("compiled heads: the gradient forgets the sum of a row", "engines/numba/kernels/head_rows.py", "row_gradient_(s, p, n, m, share * sums[r] / divisor, g[r], f32(1) / divisor)", "row_gradient_(s, p, n, m, share, g[r], f32(1))", ("fused rows",)),
    Bug("compiled heads: a ReLU passes negative products", "engines/numba/kernels/head_rows.py", "x[j] = w * d[j] if x[j] > f32(0) else f32(0)", "x[j] = w * d[j]", ("fused rows",)),
    Bug("compiled heads: the gradient of w without its ReLU", "engines/numba/kernels/head_rows.py", "total += d[j] * max(x[j], f32(0))", "total += d[j] * x[j]", ("fused rows",)),
    Bug("indexer: the maximum moves alone", "engines/triton/kernels/indexer.py", "x += (new - m) * total + tl.sum(", "x += tl.sum(", ("indexers",)),
    Bug("indexer: parts are merged about the wrong maximum", "engines/triton/kernels/indexer.py", "x += (new - m) * total + part_x + (new - part_m) * part_total", "x += (new - m) * total + part_x", ("indexers",)),
    Bug("indexer: a forbidden key is passed over", "engines/triton/kernels/indexer.py", "        if FORBIDS:\n", "        if False:\n", ("indexers",)),
    Bug("indexer: keys that only the index sees are left out", "engines/triton/kernels/indexer.py", "b, row_table2, mask2, sizes2, MASK2, BLOCK_I, BLOCK_J)  # fmt: skip\n    begin, _, _, end", "b, row_table, mask, sizes, MASK, BLOCK_I, BLOCK_J)  # fmt: skip\n    begin, _, _, end", ("indexers",)),
    Bug("indexer: the last head is left out", "engines/triton/kernels/indexer.py", "    total += tl.exp2(log_weight(s, m2[:, None], log2l[:, None], scale2, SCALE_FOLDED))\n    if MASK", "    if MASK", ("indexers",)),
    Bug("indexer: a head's share is left out", "engines/triton/indexer_pass.py", "        norm2.select(-1, -1).sub_(", "        (", ("indexers",)),
    Bug("indexer: a ReLU passes negative products", "engines/triton/kernels/indexer.py", "return tl.where(x <= 0.0, 0.0, x)", "return x", ("indexers",)),
    Bug("indexer: rows are not divided by their sum", "engines/triton/kernels/indexer.py", "value = x / divisor + log2l - tl.log2(divisor) * ENTROPY", "value = x / divisor + log2l", ("indexers",)),
    Bug("indexer: the gradient forgets the sum of a row", "engines/triton/kernels/indexer.py", "ratio * total, mask=there", "ratio, mask=there", ("indexers",)),
    Bug("indexer: infinite rows have a gradient", "engines/triton/kernels/indexer.py", 'tl.where(seen & (x != float("inf")), 1.0 / divisor, 0.0)', "tl.where(seen, 1.0 / divisor, 0.0)", ("indexers",)),
    Bug("indexer: queries without the weight of their head", "engines/triton/kernels/indexer.py", "dq * (g * w)[:, None]", "dq * g[:, None]", ("indexers",)),
    Bug("indexer: keys forget earlier strips", "engines/triton/kernels/indexer.py", "    if ADD:\n        dk += tl.load(at, mask=there, other=0.0)\n", "", ("indexers",)),
    Bug("indexer: keys are not scaled back", "engines/triton/indexer_pass.py", "(dk.sum(0) * scale)", "dk.sum(0)", ("indexers",)),
    Bug("patterns: rows without a target count", "patterns.py", "there = rows.unsqueeze(-1) & (targets >= 0)", "there = rows.unsqueeze(-1).expand(*rows.shape, targets.shape[-1])", ("patterns",)),
    Bug("patterns: the largest entropy is that of all keys", "patterns.py", "return weights._with(zeros).lse()", "return weights._with(replace_fields(zeros, mask=None)).lse()", ("patterns",)),
    Bug("comparison: total variation is not halved", "core/rows/comparison.py", "return (x.p - x.q).abs().sum(-1) / 2", "return (x.p - x.q).abs().sum(-1)", ("comparison",)),
    # core/rows/spans.py: tiles and cells of complete rows.
    Bug("spans: every strip takes the gradient of the maximum", "core/rows/strips.py", "return g.masked_fill(~of_this_strip, 0).to(value.dtype)", "return g.to(value.dtype)", ("spans",)),
    Bug("spans: a strip takes all of the gradient of an lse", "core/rows/strips.py", "        return g * share\n", "        return g\n", ("spans",)),
    Bug("spans: a strip forgets where it begins", "core/rows/spans.py", "x = x.narrow(dim, start - part.start, stop - start)", "x = x.narrow(dim, 0, stop - start)", ("spans",)),
    Bug("spans: the log of a mass is taken of its sum", "core/rows/spans.py", "return safe_lse(x.masked_fill(~cells, -torch.inf), -1) if self.log", "return (x.exp() * cells).sum(-1).log() if self.log", ("spans",)),
    Bug("spans: a cover takes a block too many", "core/rows/spans.py", "before = value.cumsum(-1) - value", "before = value.cumsum(-1) - 2 * value", ("spans",)),
    Bug("spans: a block mask takes positions for rows", "core/rows/spans.py", "rows = (block.i[:, 0] - block.offset) // self.rows", "rows = block.i[:, 0] // self.rows", ("spans",)),
    Bug("spans: segments are counted from 1", "core/arguments.py", "count = int(segments.max()) + 1 if n else 0", "count = int(segments.max()) if n else 0", ("spans",)),
    Bug("Triton's tiles: a new maximum does not shrink the open tile", "engines/triton/kernels/tile_states.py", "            open_tile *= alpha\n", "            open_tile *= 1.0\n", ("tiles in Triton",)),
    Bug("Triton's tiles: the next tile begins with the last one's keys", "engines/triton/kernels/tile_states.py", "            m, l, open_tile = no_keys(m, l, open_tile, BY)\n            begin = edge\n", "            begin = edge\n", ("tiles in Triton",)),
    Bug("Triton's tiles: by lse on the row's maximum", "engines/triton/kernels/tile_states.py", "        m, l = tl.full(m.shape, EMPTY_MAX, tl.float32), tl.zeros(l.shape, tl.float32)\n", "        l = tl.zeros(l.shape, tl.float32)\n", ("tiles in Triton",)),
    Bug("Triton's tiles: those that no row sees are not written", "engines/triton/kernels/tile_states.py", "    store_nothing(out, out_pivot, b, h, i, tl.maximum(c, 0), tiles, tiles, sizes, BY, 16)\n", "", ("tiles in Triton",)),
    Bug("Triton's tiles: the sink takes no weight", "engines/triton/kernels/tile_states.py", "        l = tl.exp2(m - new_m) * l + tl.exp2(sink2 - new_m)\n", "        l = tl.exp2(m - new_m) * l\n", ("tiles in Triton",)),
    Bug("Triton's tiles: rows of a tile on one pivot", "engines/triton/kernels/tile_states.py", "state * tl.exp2(pivot - new)", "state", ("tiles in Triton",)),
    Bug("Triton's tiles: some rows of a tile are left out", "engines/triton/tile_pool_pass.py", "here.copy_(_MERGE[by](here, part))", "here.copy_(part)", ("tiles in Triton",)),
    Bug("segments: runs before the first segment count", "core/rows/segments.py", "[first : last + 2]", "[: last - first + 2]", ("segments",)),
    Bug("segments: runs of an older version of the ids", "core/rows/segments.py", " or version != segments._version", "", ("segments",)),
    Bug("compiled tiles: a tile begins with its scores", "engines/numba/kernels/tile_pool.py", "tiles[tile, 1] *= np.exp(tiles[tile, 0] - new)", "tiles[tile, 1] *= 1", ("fused rows: tiles",)),
    Bug("compiled tiles: the maximum is not divided by the row", "engines/numba/kernels/tile_pool.py", "w = exp(s[j] - m) * share", "w = exp(s[j] - m)", ("fused rows: tiles",)),
    Bug("compiled tiles: exp is centred on another tile", "engines/numba/kernels/tile_pool.py", "add_exp_(sums[a:], s, z - a, top[a:])", "add_exp_(sums[a:], s, z - a, top)", ("fused rows: tiles",)),
    Bug("compiled tiles: keys before the window count", "engines/numba/kernels/tile_pool.py", "    \"\"\"Merge the columns of a tile of scores into the pooled tiles.\"\"\"\n    j, stop = max(j0, T.key_from)", "    \"\"\"Merge the columns of a tile of scores into the pooled tiles.\"\"\"\n    j, stop = max(j0, T.key_from - 1)", ("fused rows: tiles",)),
    Bug("compiled tiles: chunks are added up by lse", "engines/numba/tile_pool.py", "torch.logsumexp(top + total.log(), 0)", "(top + total.log()).sum(0)", ("fused rows: tiles",)),
    Bug("spans: a window visits all rows", "core/rows/questions.py", "part = self if (tiling.i0, tiling.i1) == (0, i) else self.rows(slice(tiling.i0, tiling.i1))", "part, rows = self, tile_edges(tiling.rows, tiling.i0, tiling.i1)", ("spans",)),
    Bug("heads: chosen heads of other keys share a group", "core/rows/relations.py", "if rest or owners !=", "if rest or owners is None and owners !=", ("row statistics",)),
    Bug("comparison: the textbook's logarithms are those of weights", "engines/reference.py", "_, log_w = weights_from_norm(s, norm, False)", "log_w = weights_from_norm(s, norm, False)[0].log()", ("comparison",)),
    # core/rows/complete_rows.py and core/rows/head_reduction.py: heads together, distances, patterns.
    Bug("heads: the log of a mean is that of the sum", "core/rows/sources.py", "torch.where(counts, factors, 1).log(), 2, divisor=total)", "torch.where(counts, factors, 1).log(), 2)", ("row statistics",)),
    Bug("heads: a mean over all groups", "core/rows/head_shares.py", "return self.factors.unflatten(1, (-1, self.size)).sum(2)", "return self.factors.sum(1, keepdim=True).expand(1, self.factors.shape[1] // self.size, 1, 1)", ("row statistics",)),
    Bug("heads: a mean is multiplied by a rounded share", "core/rows/head_shares.py", "y if total is None else y / total", "y if total is None else y * (1 / total)", ("row weights: heads",)),
    Bug("heads: the entropy leaves the sink out", "core/rows/complete_rows.py", "return rows if strip.sink is None or strip.log_sink is None else rows + _entropy(strip.sink, strip.log_sink)", "return rows", ("row statistics",)),
    Bug("heads: keys of the largest count from the strip", "core/rows/complete_rows.py", "keys + torch.where(keys < 0, 0, part.cols.start)", "keys", ("row statistics",)),
    Bug("gather: a key outside the strip is its first", "core/rows/complete_rows.py", "keys - part.cols.start, -1)", "keys - part.cols.start, 0)", ("row statistics",)),
    Bug("distances: the variance forgets its mean", "core/rows/complete_rows.py", "return (w * (distances - mean) ** 2).sum(-1)", "return (w * distances ** 2).sum(-1)", ("row statistics",)),
    Bug("distances: a bin holds its upper edge", "core/rows/complete_rows.py", "(distances >= a) & (distances < z)", "(distances > a) & (distances <= z)", ("row statistics",)),
    Bug("patterns: the induction target is the token itself", "core/rows/complete_rows.py", "torch.where(same, order[:-1] + 1, -1)", "torch.where(same, order[:-1], -1)", ("row statistics",)),
    # kv.py and losses.py.
    Bug("kv: every key was seen by all rows", "kv.py", "return scores / (rows - before).clamp(min=1)", "return scores / rows", ("kv",)),
    Bug("kv: SnapKV smooths with a shifted window", "kv.py", "padding=kernel // 2)", "padding=kernel // 2).roll(1, -1)", ("kv",)),
    Bug("kv: TOVA may drop the last key", "kv.py", "scores = _with_largest_at_the_end(row, 1)", "scores = row", ("kv",)),
    Bug("kv: keys stay in the order of their scores", "kv.py", ".indices.sort(dim=-1).values", ".indices", ("kv",)),
    Bug("kv: eviction gathers values by other positions", "kv.py", "for layer, positions in zip(layers, stay, strict=True):", "for layer, positions in zip(layers, stay[::-1], strict=True):", ("kv",)),
    Bug("kv: a step forgets what was received before", "kv.py", "return torch.nn.functional.pad(scores, (0, new_keys)) + received", "return torch.nn.functional.pad(0 * scores, (0, new_keys)) + received", ("kv",)),
    Bug("kv: the oracle looks at the mean of heads by their maximum", "kv.py", 'weights.reduce_heads("max", groups="kv").pool_blocks(', 'weights.reduce_heads("mean", groups="kv").pool_blocks(', ("kv",)),
    Bug("kv: a window's layer is evicted", "kv.py", 'and kind.__name__ not in ("DynamicLayer", "CacheLayerMixin"):', 'and kind.__name__ == "none":', ("kv",)),
    Bug("rows: positions begin at 0 again", "core/rows/relations.py", "factors.offset + chosen.start", "factors.offset", ("kv",)),
    Bug("losses: rows without a cell count", "losses.py", "return -total / weights._over_ranks(sees.sum(), \"alignment\").clamp(min=1)", "return -total / sees.numel()", ("losses",)),
    Bug("losses: a factor above 1", "losses.py", "torch.where(largest > threshold, threshold / largest.clamp(min=threshold), 1.0)", "threshold / largest", ("losses",)),
    Bug("losses: the indexer forgets its ReLU", "core/scores/similarity.py", "torch.relu(x @ k.mT)", "(x @ k.mT)", ("losses",)),
    Bug("losses: the teacher gets the gradient of distillation", "losses.py", "of_teacher.detach().kl(of_student)", "of_teacher.kl(of_student)", ("losses",)),
    Bug("losses: the floor is a ceiling", "losses.py", "(floor - weights.entropy()).clamp(min=0)", "(weights.entropy() - floor).clamp(min=0)", ("losses",)),
    Bug("losses: the mean of no rows", "losses.py", "return rows.sum() / max(1, rows.numel())", "return rows.mean()", ("losses",)),
    Bug("losses: a relation of queries is attention", "losses.py", 'first, second = ("qkv".index(letter) for letter in pair)', "first, second = 0, 1", ("losses",)),
    Bug("losses: a choice of keys is not renormalised", "core/rows/sources.py", "self.log_w = log_w - torch.where(total == -torch.inf, 0, total)", "self.log_w = log_w", ("losses",)),
    # chains.py.
    Bug("chains: a rollout begins with the last layer", "chains.py", "for layer, share, norms in zip(stack, *_of_layers(stack, head_weights, value_norms), strict=True):", "for layer, share, norms in list(zip(stack, *_of_layers(stack, head_weights, value_norms), strict=True))[::-1]:", ("chains",)),
    Bug("chains: rows are followed from the first layer", "chains.py", "in reversed(below):", "in below:", ("chains",)),
    Bug("chains: weights of heads are not divided by their sum", "chains.py", "(y * (share / share.sum())[:, None, None])", "(y * share[:, None, None])", ("chains",)),
    Bug("chains: value norms of the query", "chains.py", "spread = torch.matmul(layer.mT, from_rows", "spread = torch.matmul(layer.mT, _scaled(from_rows, None if norms is None else norms.mean(-2))", ("chains",)),
    Bug("chains: rows of value norms are not divided by their sum", "chains.py", "return x / torch.where(sums == 0, 1, sums)", "return x", ("chains",)),
    Bug("chains: negative relevance counts", "core/rows/complete_rows.py", "(relevance.clamp(min=0) if self.positive else relevance)", "relevance", ("chains",)),
    # engines/replay.py.
    Bug("replay: on tensors of another signature", "engines/replay.py", "return key, shared, *each", "return key, shared", ("replay",)),
    Bug("replay: a question is replayed for another matrix", "core/evaluation.py", 'key = "question", self._spec, spec,', 'key = "question", spec,', ("replay",)),
    Bug("replay: the signature ignores inputs at one address", "engines/replay.py", "shared = None if len({*at}) == len(at) else tuple(map(at.index, at))", "shared = None", ("replay",)),
    Bug("replay: a part is taken for the tensor at its address", "engines/replay.py", "elif of is None or self._place_in(x, of) != self.places[cached]:", "elif False:", ("replay",)),
    Bug("replay: a view begins where its tensor does", "engines/replay.py", "at[place[0]] + place[1]", "at[place[0]]", ("replay",)),
    Bug("replay: what is still needed is dropped", "engines/replay.py", "sorted(step.used - needed)", "sorted(step.used)", ("replay",)),
    Bug("replay: a number that was read back is taken for constant", "engines/replay.py", "if -1 in reads or not on_device or", "if", ("replay",)),
    Bug("replay: an allocation has other strides", "engines/replay.py", "partial(make, tuple(out.shape), out.stride(), out.dtype)", "partial(torch.empty, tuple(out.shape), dtype=out.dtype)", ("replay",)),
    Bug("replay: users' functions are replayed", "engines/replay.py", "if cached is None and is_constant(key):", "if cached is None:", ("replay",)),
    # engines/numba: compiled tiles.
    Bug("numba: a new maximum does not shrink the sum", "engines/numba/kernels/forward.py", "    l[r] *= alpha\n", "    pass\n", ("bound",)),
    Bug("numba: lse is the logarithm of the sum alone", "engines/numba/kernels/forward.py", "np.float64(m[r]) + np.log(np.float64(l[r]))", "np.log(np.float64(l[r]))", ("bound",)),
    Bug("numba: a new maximum does not shift the entropy", "engines/numba/kernels/forward.py", "t[r] = alpha * (t[r] + shift * l[r])", "t[r] = alpha * t[r]", ("bound",)),
    Bug("numba: a new maximum does not shrink the output", "engines/numba/kernels/forward.py", "scale_(reals(T, T.y + size * out * T.E, T.E), T.E, alpha)", "pass", ("bound",)),
    Bug("numba: the tile to the left leaks into the output", "engines/numba/kernels/forward.py", "                zero_(row, 0, a)\n", "                pass\n", ("bound",)),
    Bug("numba: the tile to the right leaks into the output", "engines/numba/kernels/forward.py", "                zero_(row, z, cols)\n", "                pass\n", ("bound",)),
    Bug("numba: the sink is left out of the entropy", "engines/numba/kernels/forward.py", "+ one * theirs", "", ("bound",)),
    Bug("numba: values of the wrong head", "engines/numba/kernels/forward.py", "h * T.V // T.H * T.v_h", "h % T.V * T.v_h", ("bound",)),
    Bug("numba: sums of columns are not put back to zero", "engines/numba/kernels/column_pass.py", "    zero_(column, 0, cols)\n", "    pass\n", ("bound",)),
    Bug("numba: a kept tile is not brought to the maximum of its rows", "engines/numba/kernels/column_pass.py", "exp(maxima[r] - m) * share, column)", "share, column)", ("strips",)),
    Bug("numba: a row of nan reaches keys that it does not see", "engines/numba/kernels/strip_pass.py", "fits and not any_nan(T, head, i0, rows)", "fits", ("strips",)),
    Bug("numba: tiles of a strip overwrite one another", "engines/numba/kernels/strip_pass.py", "T.strip if fits else 1", "1", ("strips",)),
    Bug("scores of narrow inputs are rounded twice", "core/scores/kinds.py", "return x.dtype if x.is_cuda or x.dtype == torch.float64 else torch.float32", "return x.dtype", ("scores",)),
    # core/tensor_kinds.py: tensors that engines cannot read.
    Bug("a lazily negated tensor is read without its sign", "core/tensor_kinds.py", "return x.clone() if x.is_neg() or is_zero_tensor(x) else x", "return x", ("tensor kinds",)),
    Bug("a tangent is dropped", "core/tensor_kinds.py", "if not in_forward_ad() or in_functorch():", "if True:", ("tensor kinds",)),
    Bug("torch.jit.trace is not noticed", "core/tensor_kinds.py", "if in_jit_trace() and not is_tracing():", "if False:", ("tensor kinds",)),
    # core/array_protocol.py and core/indexing.py: array protocol.
    Bug("the second word is counted from 0", "core/indexing.py", "return (name, int(nth)) if numbered else (word, None)", "return (name, int(nth) + 1) if numbered else (word, None)", ("array protocol",)),
    Bug("a word is in the matrix however often it occurs", "core/indexing.py", "return len(self.positions(name)) >= (1 if nth is None else max(nth, 1))", "return bool(self.positions(name))", ("array protocol",)),
    Bug("a product from the left is one from the right", "core/evaluation.py", "return right.__rmatmul__(left)  # type: ignore[attr-defined]", "return right.__matmul__(left.mT)", ("array protocol",)),
    Bug("numba: a pooled part visits all keys", "engines/numba/kernels/column_pass.py", "if j0 + cols <= T.key_from or j0 >= T.key_to:", "if cols < 0:", ("pooled part",)),
    Bug("a pooled part is cut from its rows twice", "core/evaluation.py", "tiling = replace_fields(window, i0=0, i1=window.i1 - window.i0)", "tiling = window", ("pooled part",)),
    Bug("numba: pooled rows begin one late", "engines/numba/kernels/column_pass.py", "return ((i - T.i0 + 1) * T.tile_rows - 1) // (T.i1 - T.i0)", "return (i - T.i0) * T.tile_rows // (T.i1 - T.i0)", ("bound",)),
    Bug("numba: distance without its sign taken off", "engines/numba/kernels/row_ops.py", "total += p[j] * p.dtype.type(abs(i32(first_distance) - i32(j)))", "total += p[j] * p.dtype.type(i32(first_distance) - i32(j))", ("bound",)),
    Bug("numba: an equal score goes before", "engines/numba/kernels/row_ops.py", "    if not x > score[n - 1]:\n", "    if not x >= score[n - 1]:\n", ("ties",)),
    Bug("numba: a row that is chosen twice is modified twice", "engines/numba/kernels/cells.py", "T.modifier_count > 0 and i != last:", "T.modifier_count > 0:", ("row weights: rows chosen twice",)),
    Bug("numba: a cell beyond its row's interval is shown", "engines/numba/kernels/cells.py", "if a <= col_at[c] - j0 < z:", "if col_at[c] - j0 < z:", ("row weights: intervals",)),
    Bug("numba: cells in the order of their keys", "engines/numba/kernels/cells.py", "out_row[col_place[c]] = row", "out_row[c] = row", ("row weights",)),
    Bug("numba: exp is a digit short", "engines/numba/kernels/intrinsics.py", "p = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5", "p = (((_E2) * r + _E3) * r + _E4) * r + _E5", ("bound",)),
    Bug("numba: exp of float64 is three digits short", "engines/numba/kernels/intrinsics.py", "p = ((((_S13 * r + _S12) * r + _S11) * r + _S10) * r + _S9) * r + _S8", "p = _S9 * r + _S8", ("compiled tiles",)),
    Bug("numba: norms of float64 at the places of float32", "engines/numba/kernels/row_ops.py", "T.norm + 2 * T.itemsize * row", "T.norm + 8 * row", ("compiled tiles",)),
    Bug("numba: the gradient forgets the slope of a cap", "engines/numba/kernels/backward.py", "        mul_(d, n, slope)\n", "        pass\n", ("gradients in float32",)),
    Bug("numba: keys outside an interval get gradients", "engines/numba/kernels/backward.py", "                    zero_(row, z, cols)\n", "                    pass\n", ("gradients in float32",)),
    Bug("numba: the gradient of the mean distance is lost", "engines/numba/kernels/backward.py", "    if T.d_distance != 0:\n", "    if T.d_distance != 0 and T.d_distance == 0:\n", ("gradients in float32",)),
    # nn/pretrained.py
    Bug("from_pretrained: RoBERTa's positions begin at its padding", "nn/pretrained.py", "0 if start is None else start + 1 :", "0 if start is None else start :", ("from_pretrained",)),
    Bug("from_pretrained: the norms have PyTorch's own ε", "nn/pretrained.py", "            module.eps = eps\n", "            pass\n", ("from_pretrained",)),
    # core/dropout.py
    Bug("attention dropout: rows are normalised again", "core/dropout.py", "    return statistics.y * share.unsqueeze(-1).to(statistics.y.dtype)\n", "    return statistics.y / (1 - p)\n", ("attention dropout",)),
    Bug("attention dropout: heads drop the same weights", "core/dropout.py", "(q.shape[:-3].numel(), q.shape[-3], 1, 1)", "(q.shape[:-3].numel(), 1, 1, 1)", ("attention dropout",)),
    # distributed: pieces of other ranks' keys, and the way back.
    Bug("ranks: a piece's offset forgets where its keys begin", "distributed/pairs.py", "rows.start + factors.query_offset - keys.start)", "rows.start + factors.query_offset)", ("ranks",)),
    Bug("ranks: the entropy of a piece is taken for its sum", "distributed/pairs.py", "l * (torch.where(l == 0, 1, l).log() - entropy)", "l * entropy", ("ranks",)),
    Bug("ranks: the largest keys keep their places in the piece", "distributed/pairs.py", "torch.where(index < 0, index, index + key_start)", "index", ("ranks",)),
    Bug("ranks: means of pieces are merged without their sums", "distributed/pairs.py", "x.to(l.dtype) * (l.unsqueeze(-1) if x.ndim > l.ndim else l)", "x.to(l.dtype)", ("ranks",)),
    Bug("ranks: tiles of the pooled map begin with the piece", "distributed/pairs.py", "t.j0 - keys.start, t.j1 - keys.start)", "t.j0, t.j1)", ("ranks",)),
    Bug("ranks: sums of keys stay where they were computed", "distributed/exchange.py", "        total[:, :, at] += part\n", "        total[:, :, at] = part\n", ("ranks",)),
    Bug("ranks: a sink of every rank", "distributed/pairs.py", "replace_fields(factors.score.crop(*at), sink_logits=None)", "factors.score.crop(*at)", ("ranks",)),
    Bug("ranks: column statistics lose their row term", "distributed/passes.py", "        delta = delta + (torch.cat(left[len(left) - len(columns) :], -1) * mixed).sum(-1)\n", "", ("ranks: gradients",)),
    Bug("ranks: parameters get the gradient of one rank", "distributed/passes.py", "total.copy_(job.plan.ranks.sum(total))", "pass", ("ranks: gradients",)),
    Bug("ranks: a function is called at the places of the piece", "core/scores/modifiers.py", "self.function(s, i + self.start, j + self.start, *parameters)", "self.function(s, i, j, *parameters)", ("ranks: functions",)),
    Bug("ranks: a mask function is called at the places of the piece", "core/masks/algebra.py", "block.offset - self.row_start + self.key_start", "block.offset", ("ranks: functions",)),
    Bug("ranks: masks are not compared", "distributed/build.py", '        "mask": describe(mask),\n', "", ("ranks: faults",)),
    Bug("ranks: each rank takes the first sequences of a batch", "distributed/build.py", "            factors = factors.pick(axis, chosen)\n", "            factors = factors.pick(axis, range(len(chosen)))\n", ("ranks: dtensors",)),
    # look: two recordings, pictures, patches.
    Bug("compare: the share of a sink is forgotten", "look/compare.py", "(1 - outcomes.sum(-1, keepdim=True)).clamp(min=0)", "0 * outcomes[..., :1]", ("two recordings",)),
    Bug("compare: words of the second text at the places of the first", "look/alignment.py", "spread[..., at] = w[..., words]", "spread[..., words] = w[..., words]", ("two recordings",)),
    Bug("compare: the farthest head is the nearest", "look/compare.py", "if total < nearest[g]:", "if nearest[g] == torch.inf or total > nearest[g]:", ("two recordings",)),
    Bug("compare: the mean is over the rows of both texts", "look/compare.py", "float(total[n]) / len(rows.in_both)", "float(total[n]) / len(rows)", ("two recordings",)),
    Bug("pictures: letters of five points", "look/svg_elements.py", "LETTERS * 72 / 7.5", "LETTERS * 72 / 5", ("sizes of pictures",)),
    Bug("pictures: a line runs through the words", "look/svg.py", "g0, g1 = (y + (-14 if up else 15) for y in (y0, y1))", "g0, g1 = (y + (14 if up else -15) for y in (y0, y1))", ("sizes of pictures",)),
    Bug("patches: the image lies on its side", "look/patches.py", "pixels = pixels.permute(2, 0, 1)", "pixels = pixels.permute(2, 1, 0)", ("patches",)),
    Bug("patches: registers come last", "core/patches.py", "[*first, *(f\"{row},{col}\" for row in range(rows) for col in range(cols))]", "[*(f\"{row},{col}\" for row in range(rows) for col in range(cols)), *first]", ("patches",)),
    Bug("largest weight of a tile: the mask is forgotten", "look/dot_head.py", "w.masked_fill_(~visible, 0.0)", "w.masked_fill_(~visible, 0.5)", ("maps of long inputs",)),
    Bug("exact rows: always the first head", "look/dot_head.py", "one = weights[[head]]\n        problem = ", "one = weights[[0]]\n        problem = ", ("maps of long inputs",)),
    Bug("exact rows: the lse of the queries before they were rounded", "look/dot_head.py", "return replace(changed, lse=one._with(factors).lse()[0].float().cpu())", "return changed", ("maps of long inputs",)),
    Bug("exact rows: a bias of the rows added to lse", "look/dot_head.py", "lse = lse - added[:, 0]", "lse = lse + added[:, 0]", ("maps of long inputs",)),
    Bug("bands: the norm of another row", "look/dot_head.py", "-lse.float().nan_to_num(neginf=0.0).unsqueeze(-1)", "-lse.float().nan_to_num(neginf=0.0).flip(0).unsqueeze(-1)", ("bands of long inputs",)),
    Bug("bands: keys received from the last band alone", "look/bands.py", "received += band.received", "received = band.received.double()", ("bands of long inputs",)),
    Bug("served tiles: a mean over the rows of a full cell", "look/serve/pyramid.py", "    heights[-1] = rows - (len(sums) - 1) * words\n", "", ("served tiles",)),
    Bug("served tiles: rows and keys exchanged", "look/serve/pyramid.py", "for n, size in ((y, self.i), (x, self.j))", "for n, size in ((x, self.i), (y, self.j))", ("served tiles",)),
    Bug("served tiles: the mask is forgotten", "look/serve/pyramid.py", "s.masked_fill_(~((at >= low) & (at < high)).any(0), -torch.inf)", "pass", ("served tiles",)),
    Bug("served: every host is ours", "look/serve/guard.py", "if hosts[0] not in self.hosts:", "if not hosts[0]:", ("hostile requests",)),
    Bug("served: a link works for ever", "look/serve/guard.py", "        self._token = secrets.token_urlsafe(32)\n        return True", "        return True", ("hostile requests",)),
    # recorder: attention that is written out, its graph, and its hooks.
    Bug("values on the left: weights not transposed", "recorder/hooks/eager_attention.py", "weights, v = right if one_row else right.mT,", "weights, v = right,", ("unannounced attention",)),
    Bug("weights before dropout in the order of softmax", "recorder/hooks/softmax_trail.py", "clean.as_strided(x.shape, x.stride(), clean.storage_offset() + x.storage_offset())", "clean.reshape(x.shape)", ("unannounced attention",)),
    Bug("rows that sum to more than 1 are weights", "recorder/hooks/meeting.py", "bool((w.sum(-1) > 1.01).any())", "bool((w.sum(-1) > 1000).any())", ("unannounced attention",)),
    Bug("exp that is not divided is weights", "recorder/hooks/meeting.py", "divided = alias.altered in (DIVIDED, POINTWISE, UNNORMALISED) and sums_to_one(w)", "divided = alias.altered in (DIVIDED, POINTWISE, UNNORMALISED)", ("unannounced attention",)),
    Bug("rejected candidates keep their rows", "recorder/kv_cache.py", "self.queries.append(q[:, :, :rows])", "self.queries.append(q[:, :, -rows:])", ("generations",)),
    Bug("rejected candidates keep their words", "recorder/tokens.py", "by_stem[stem][:, : e.before]", "by_stem[stem]", ("generations",)),
    Bug("recorded biases leave the graph", "recorder/calls.py", "    if not grad:\n        score = tree_map(", "    if True:\n        score = tree_map(", ("recorded gradients",)),
    Bug("recorded queries leave the graph", "recorder/thread_recorder.py", "copy=site.compiled, grad=self.wants_grad)", "copy=site.compiled)", ("recorded gradients",)),
    Bug("an interrupted block leaves its key", "recorder/hooks/tap.py", "            _retain(live)  # a block", "            pass  # a block", ("interrupted recordings",)),
]  # fmt: skip


#: Some of its parts are slow, and any of them may be the one that sees a bug.
INTERPRETED = "engines/test_triton_interpreted.py"


def run(copy: Path, tests: str) -> tuple[bool, float]:
    """Whether these tests pass against the copy, and how long that took."""
    file, chosen = TESTS[tests]
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(ROOT / "tests" / file),
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "slow or not slow" if file == INTERPRETED else "not slow",
    ]
    done = subprocess.run(
        [*command, *(["-k", chosen] if chosen else [])], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(copy.parent), "NUMBA_CACHE_DIR": str(copy.parent / "cache")},
    )  # fmt: skip
    # 1 is a failed test, 2 an error while a file was read; all else is no verdict.
    assert done.returncode in (0, 1, 2), f"{tests}: {done.stdout}\n{done.stderr}"
    return done.returncode == 0, time.monotonic() - began


def plant(copy: Path, bug: Bug, sound: list[str]) -> bool:
    """Whether the bug is caught by tests that pass without it."""
    path, clean = copy / bug.file, copy.parent / "clean" / bug.file
    path.write_text(clean.read_text().replace(bug.old, bug.new, 1))
    try:
        return any(not run(copy, tests)[0] for tests in sound)
    finally:
        shutil.copy2(clean, path)


def main(words: list[str], jobs: int) -> int:
    bugs = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    moved = [f"{bug.name} ({bug.file})" for bug in bugs if bug.old not in (PACKAGE / bug.file).read_text()]
    assert not moved, f"the code has moved on, and so must these patches: {', '.join(moved)}"
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for job in range(jobs):
            copy = Path(folder) / str(job) / "regard"
            shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
            shutil.copytree(copy, copy.parent / "clean")  # what is worked on meanwhile does not matter
            copies.put(copy)

        def passes(tests: str) -> bool:
            copy = copies.get()
            passed, seconds = run(copy, tests)
            copies.put(copy)
            print(f"{'passes' if passed else 'FAILS':9} {seconds:5.1f} s  nothing planted: {tests}", flush=True)
            return passed

        def catches(bug: Bug) -> bool:
            copy, began = copies.get(), time.monotonic()
            sound = [tests for tests in bug.tests if verdicts[tests]]
            caught = plant(copy, bug, sound)
            copies.put(copy)
            verdict = "caught" if caught else "SURVIVED" if sound else "NO TEST"
            print(f"{verdict:9} {time.monotonic() - began:5.1f} s  {bug.file}: {bug.name}", flush=True)
            return caught

        groups = list(dict.fromkeys(tests for bug in bugs for tests in bug.tests))
        verdicts = dict(zip(groups, pool.map(passes, groups), strict=True))
        caught = list(pool.map(catches, bugs))
    print(f"{sum(caught)} of {len(bugs)} planted bugs caught")
    return 0 if all(caught) and all(verdicts.values()) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", help="only the bugs whose names hold one of these words")
    parser.add_argument("--jobs", type=int, default=2, help="so many at once, each in a copy of its own (default 2)")
    options = parser.parse_args()
    sys.exit(main(options.words, options.jobs))
