"""The variants: what each changes against the baseline, in two settings of equal compute per setting.

*Scratch* starts from random weights. *Shift* starts from a drafter that was distilled on code only, and adapts to math
while both are judged: that is what a trainer meets when traffic drifts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Setting = Literal["scratch", "shift"]


@dataclass(frozen=True)
class Variant:
    """`config` overrides DistillConfig. `new_share`: share of a step's sequences from the new traffic (shift only).

    `vocabulary`: rows of a reduced draft head, 0 for the target's own.
    """

    name: str
    setting: Setting
    config: dict[str, Any] = field(default_factory=dict)
    new_share: float = 0.5
    vocabulary: int = 0


BASE: dict[str, Any] = {"loss": "adaflash", "alpha": 0.8, "clip": 10.0, "decay": 7.0}

VARIANTS = [
    Variant("adaflash (baseline)", "scratch"),
    Variant("dflash: CE only", "scratch", {"loss": "dflash"}),
    Variant("sft: CE on served tokens, no decay", "scratch", {"loss": "sft"}),
    Variant("dpace", "scratch", {"loss": "dpace"}),
    Variant("tv", "scratch", {"loss": "tv"}),
    Variant("draft_opd", "scratch", {"loss": "draft_opd"}),
    Variant("clip 0.1 per entry", "scratch", {"clip": 0.1, "clip_kind": "entry"}),
    Variant("AdamW 1e-3", "scratch", {"optimizer": "adamw", "learning_rate": 1e-3}),
    Variant("draft vocabulary 8192", "scratch", vocabulary=8192),
    Variant("baseline: half new, half replayed", "shift"),
    Variant("dpace", "shift", {"loss": "dpace"}),
    Variant("all new, no replay", "shift", new_share=1.0),
    Variant("anchors at rejections", "shift", {"anchors_at": "rejections"}),
    Variant("draft_opd, anchors at rejections", "shift", {"loss": "draft_opd", "anchors_at": "rejections"}),
    Variant("frozen context side", "shift", {"freeze_context": True}),
]
