"""Generation by transformers and torch: a worker that decode_smollm2.py compares jaxrl with.

`python benchmarks/decode_peer.py --folder F --threads N`, with the extra `interop` installed.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM
from workers import answer, timed


def main() -> None:
    """Answer {prompts, new, cache}: greedy tokens, CPU and wall seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    # Every row makes all its tokens, as ours do.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], new: int, cache: str) -> dict:
        tokens = torch.tensor(prompts)
        options = {} if cache == "dynamic" else {"cache_implementation": cache}

        def work() -> torch.Tensor:
            return model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=new,
                do_sample=False,
                **options,
            )

        result, times = timed(work)
        return {"tokens": result[:, tokens.shape[1] :].tolist(), **times}

    answer(generate)


if __name__ == "__main__":
    main()
