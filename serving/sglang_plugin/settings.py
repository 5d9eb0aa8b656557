"""How a worker verifies: chosen in the worker's settings, read by the plugin inside each scheduler rank.

SGLang refuses command-line arguments it does not know, so this travels as one environment variable.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

ENV = "ADAFLASH_VERIFY"
Mode = Literal["static", "shadow", "adaptive"]
Rule = Literal["survival", "length"]
OFF_FRACTION = 1e-6  # a forced share of the budget up to this means: do not draft at all (`adaflash profile-verify`)
# SGLang's names for the three ways to run a verify step.
RAGGED_MODE: dict[Mode, str] = {"static": "static", "shadow": "cap-accept", "adaptive": "compact"}


class VerifySettings(BaseModel):
    """`rate` belongs to the `length` rule, `cost_table` to `survival` and to switching speculation off."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode = "static"
    rule: Rule = "survival"
    rate: float = 1.3
    cost_table: Path | None = None
    switch: bool = True

    def to_environment(self) -> dict[str, str]:
        """What the launcher adds to the engine's environment."""
        return {ENV: self.model_dump_json()}

    @classmethod
    def from_environment(cls) -> VerifySettings:
        """The settings of this process; `static` where no launcher set any."""
        text = os.environ.get(ENV)
        return cls.model_validate_json(text) if text else cls()
