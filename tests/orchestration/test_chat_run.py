"""A run that asks its prompts in a chat, from the cold start to the folder that is published."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tokenizers

from jaxrl.data.chat import load_chat_template
from jaxrl.data.tokenizers import Tokenizer, load_tokenizer
from jaxrl.orchestration.rl import RLTrainer
from jaxrl.orchestration.run_dir import RunDir

CHAT = (
    "{% for m in messages %}{{ '<' ~ m.role ~ '>' }}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def chat_folder(tmp_path):
    """Folder of a character tokenizer with a chat template."""
    inner = tokenizers.Tokenizer.from_str(load_tokenizer("chars").inner.to_str())
    inner.add_special_tokens(["<system>", "<user>", "<assistant>", "<end>"])
    tokenizer = Tokenizer(
        inner, "chat", pad_id=0, bos_id=1, eos_id=2, chat_templates={"default": CHAT}
    )
    tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


def test_run_in_a_chat_asks_stops_and_trains_with_its_tokens(make_config, chat_folder, tmp_path):
    config = make_config(
        data={
            "tokenizer": str(chat_folder),
            "chat": True,
            "system_prompt": "Turn",
            "max_prompt_tokens": 12,
        },
        sft={"steps": 25, "learning_rate": 1e-2},
        train={"steps": 1},
        model={"max_length": 20},
    )

    with RLTrainer(config, devices=jax.devices()[:1]) as trainer:
        trainer.fit()
        evaluation = trainer.evaluate()
        said = trainer.sampler.generate("ab=")

    tokenizer = load_tokenizer(str(chat_folder))
    end = tokenizer.special_tokens["<end>"]
    groups, _ = RunDir(config.output_dir).read_trajectories(25)
    trajectories = [t for group in groups for t in group.trajectories]
    stopped = [t for t in trajectories if t.finish_reason == "stop"]
    head = [*tokenizer.encode("Turn"), end, tokenizer.special_tokens["<user>"]]
    for trajectory in trajectories:
        assert trajectory.tokens[1 : len(head) + 1].tolist() == head
        sampled = np.flatnonzero(trajectory.loss_mask)
        assert trajectory.tokens[sampled[0] - 1] == tokenizer.special_tokens["<assistant>"]
    # The cold start taught it to end its replies as the template does.
    assert len(stopped) > len(trajectories) // 4
    assert {int(t.tokens[-1]) for t in stopped} == {end}
    assert evaluation.prompts == 8
    assert said.finish_reason in ("stop", "length")
    trainer.session.parts.tokenizer.save(tmp_path / "published")
    loaded = load_tokenizer(str(tmp_path / "published"))
    assert load_chat_template(str(tmp_path / "published"), loaded).end_id == end
