"""Which of transformers' model classes can be served: each is tried on a tiny random model, and checked at length.

Owns: tiny models, the long check, the verdict on one class.  Does not own: the order of classes, processes, the page
that shows the verdicts (``serve.survey``).  ``python -m ostinato.runtime.survey`` judges the classes that its stdin
names.
"""

from ostinato.runtime.survey.verdict import Verdict, causal_classes, judge

__all__ = ["Verdict", "causal_classes", "judge"]
