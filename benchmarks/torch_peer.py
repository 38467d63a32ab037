"""The same work in torch and transformers: what jaxrl is compared with. Prints JSON.

`python benchmarks/torch_peer.py step|load [...]`, with the extra `interop` installed.
"""

from __future__ import annotations

import argparse

import torch
from shapes import emit, measure, now
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROWS, LENGTH = 8, 128
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
)


def step(repeats: int) -> dict:
    """Tokens per second of a supervised update with AdamW."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(SMOLLM2).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0, fused=True)
    tokens = torch.randint(0, SMOLLM2.vocab_size, (ROWS, LENGTH))

    def update() -> int:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        loss.item()
        return ROWS * LENGTH

    return {"smollm2_step": measure(update, repeats)}


def load(path: str, gguf_file: str | None) -> dict:
    """Seconds until the weights are there in float32."""
    start = now()
    # Gradients would cost time that loading does not need.
    torch.set_grad_enabled(False)
    model = AutoModelForCausalLM.from_pretrained(path, gguf_file=gguf_file, dtype=torch.float32)
    total = sum(parameter.sum().item() for parameter in model.parameters())
    cpu, wall = (end - begin for begin, end in zip(start, now(), strict=True))
    return {"cpu_seconds": round(cpu, 3), "wall_seconds": round(wall, 3), "sum": total}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("step", "load"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--path", default="")
    parser.add_argument("--gguf-file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = step(args.repeats) if args.what == "step" else load(args.path, args.gguf_file)
    emit({"benchmark": f"torch_{args.what}", "torch": torch.__version__, **result})


if __name__ == "__main__":
    main()
