"""Judges one class per line of stdin, and answers with one line of JSON each.

Libraries print what they like: stdout is theirs no more once this process has kept it for the answers.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from dataclasses import asdict

import torch
import transformers

from ostinato.runtime.survey.verdict import judge


def main() -> None:
    """Until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(asdict(judge(line.strip()))), file=answers)


if __name__ == "__main__":
    main()
