"""From which answers fitness comes, as a key of every search."""

from typing import Literal

FitnessFrom = Literal["all", "racing", "irt"]
OF_FITNESS_FROM = (
    "all: from all questions. racing: who falls hopelessly behind the best answers only some. irt: from few questions, "
    "by which item response theory estimates the answers to the others."
)
OF_FITNESS_QUESTIONS = (
    "irt: so many questions for each, of all tasks together; 0: a sixth of those that it is about, at least 16."
)
KNOWN = "2/questions"  # of irt: what the answers of round 1 say of all questions
FINALISTS = 5  # of irt: so many of the best answer all at the end
FEW_ALONE = "it says how many questions irt asks; without irt leave it out"
