"""A tiny real target made on the fly: byte tokenizer, four Llama layers, trained on a walk that is easy to draft.

Kept in the cache between runs, keyed by the code that makes it, since every test session needs the same one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from adaflash import anchors, attention, bootstrap, distill, drafter, heads, losses, optim, rope, target, vocabulary
from adaflash.bootstrap import drafter_config
from adaflash.checkpoint import save_drafter
from adaflash.distill import DistillConfig, Distiller
from adaflash.drafter import random_drafter
from adaflash.drafter_config import DrafterConfig
from adaflash.target import Target
from demo.model import cache_dir

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"]
WALK_FIRST, WALK_SIZE = 100, 120  # the target walks over these ids
BLOCK = 8
MADE_BY = (anchors, attention, bootstrap, distill, drafter, heads, losses, optim, rope, target, vocabulary)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {t: i for i, t in enumerate([*SPECIALS, *alphabet])}
    t = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(SPECIALS)
    fast = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT
    return fast


def walks(count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Sequences over the walk's ids: each token fixes the next, but at every ninth place a coin decides between two."""
    order = torch.randperm(WALK_SIZE, generator=torch.Generator().manual_seed(7))
    follow = torch.empty(WALK_SIZE, dtype=torch.long)
    follow[order] = order.roll(-1)
    out = torch.empty(count, length, dtype=torch.long)
    out[:, 0] = torch.randint(0, WALK_SIZE, (count,), generator=generator)
    for i in range(1, length):
        step = follow[out[:, i - 1]]
        coin = (torch.rand(count, generator=generator) < 0.4) & (out[:, i - 1] % 9 == 0)
        out[:, i] = torch.where(coin, (step + 17) % WALK_SIZE, step)
    return out + WALK_FIRST


def make_target(out: Path, *, tied_qwen: bool = False, layers: int = 4, steps: int = 220, seed: int = 1) -> None:
    """Trains and saves the target in fp32: a Llama, or a Qwen3 whose embedding is its head."""
    torch.manual_seed(seed)
    fast = tokenizer()
    kind = Qwen3Config if tied_qwen else LlamaConfig
    config = kind(
        vocab_size=len(fast),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=tied_qwen,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config) if tied_qwen else LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x = walks(16, 48, generator)
        logits = model(x).logits[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), x[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().generation_config.do_sample = False
    model.save_pretrained(out)
    fast.save_pretrained(out)


AWKWARD = {
    "partial-llama3": {
        "length_head": 16,
        "confidence_head": True,
        "target_layer_ids": (0, 1, 3),  # the first and the last layer
        "partial_rotary_factor": 0.5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
}


HEADED = {"narrow": 2, "headed": BLOCK, "wide": 16}  # drafters with both heads, by block size


def make_drafters(home: Path, out: Path) -> None:
    """`random`, `weak` and `good` drafters of the target, and those of `HEADED`, all fp32."""
    config = drafter_config(str(home), layers=2, block=BLOCK)
    save_drafter(random_drafter(config, 0), out / "random", torch.float32)
    train_drafter(home, config, {30: out / "weak", 120: out / "good"})
    for name, block in HEADED.items():
        with_heads = drafter_config(str(home), layers=2, block=block, length_head=True)
        train_drafter(home, with_heads, {30: out / f"{name}-weak", 60: out / name})


def train_drafter(home: Path, config: DrafterConfig, saves: dict[int, Path]) -> None:
    """Distils a drafter on the target's walks and saves it at the given steps."""
    teacher = Target(str(home), config.target_layer_ids, torch.float32)
    generator = torch.Generator().manual_seed(3)
    prompts = walks(48, 8, generator)
    sequences = teacher.model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=56, min_new_tokens=56, do_sample=False
    ).tolist()
    features = teacher.features(sequences, [8] * len(sequences))
    student = random_drafter(config, 1)
    distilling = DistillConfig(loss="adaflash", anchors=96, head_learning_rate=3e-3)
    distiller = Distiller(student, teacher.embedding, teacher.head, distilling, seed=0)
    for step in range(1, max(saves) + 1):
        places = torch.randperm(len(features), generator=generator)[:8].tolist()
        distiller.step([features[i] for i in places])
        if step in saves:
            save_drafter(student, saves[step], torch.float32)


def make_awkward(home: Path, out: Path) -> None:
    """Drafters whose configs take the paths that ordinary ones do not."""
    plain = drafter_config(str(home), layers=2, block=BLOCK)
    for name, change in AWKWARD.items():
        train_drafter(home, DrafterConfig(**(plain.model_dump() | change)), {60: out / name})


def ensure() -> Path:
    """The cached directory with `target/`, `drafters/*/`, `tied/` and `awkward/`."""
    sources = [Path(__file__), *(Path(m.__file__) for m in MADE_BY)]
    key = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()[:12]
    home = cache_dir() / "tests" / key
    if (home / "complete").is_file():
        return home
    home.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=home.parent))
    make_target(scratch / "target")
    make_drafters(scratch / "target", scratch / "drafters")
    make_target(scratch / "tied", tied_qwen=True)
    make_awkward(scratch / "tied", scratch / "awkward")
    (scratch / "complete").write_text(json.dumps({"torch": torch.__version__}))
    if not home.exists():
        os.rename(scratch, home)
    return home
