"""Which results this code gives: a number a method, so that no run is finished with other bytes than it began with."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet.errors import UserError
from fleet.our_packages import ROOT, python_in

# Of each method, the last commit or version that gave its first results, its second, and so on. Add one whenever a
# configuration that stood in a run before would give other bytes now: a maker or the order of a sum has changed, or a
# bound key's default is not what older runs, which lack the key, did, and its section's `lacked` does not say that.
_EXCHANGE = ("commit 9612bcf", "commit 4b76bd2", "commit aaa6f7d", "commit acf0c07", "commit 5fc2cdb", "commit 780815b",
             "commit 880d80a")  # fmt: skip
LAST: Mapping[str, Sequence[str]] = {
    # Then tasks' questions came in batches of BATCH_SIZE times SEQ_LENGTH tokens; then matrices lay by their shapes;
    # then plain answers to prompts began with the tokenizer's first token, and preferences were compared in PRECISION.
    # Then rows and questions were held out by what they say, all turns of a conversation on one side.
    # Then files' checksums, which are in a run's digest, were XXH3; then an adapter on one given model travelled by
    # itself; then genes and rewards had a data set's file by its own name; then irt asked other questions.
    # Then questions with rewards were drawn from all of a file, and fixed examples before them divided nothing; answers
    # ended at any mark that a model's files name; and a choice was told from one that it stands in.
    "edt-evomerge": [
        *("commit 4b76bd2", "commit 9612bcf", "commit 5fc2cdb", "commit 780815b", "commit 880d80a", "commit 486e575"),
        *("commit d4a6fb2", "commit 68fd397", "commit 6aa5a97"),
    ],
    "es": ["commit d4a6fb2", "commit 6aa5a97"],
    # Then rounds grow instead of a warm start, Muon is the default, and moments are averaged; then the built-in text
    # came in another order, and genomes had no length any more; then the outer step was a plain mean; then tokenizers
    # were made of the run's own text, and a .txt file was one document; then members' metrics had bits per byte, and
    # four members of EDT were two families unless GROUP_SIZE said otherwise; then held-out text was for validation or
    # for the test, by what it says, and moments, changes and weights travelled in fewer bits; then the test had a
    # number of sequences of its own; then checksums were XXH3; then parts of a group's mean had its members' names;
    # then weights travelled in 12 bits instead of 16.
    "edt": [*_EXCHANGE, "commit 7a6bdf1", "commit 99813f7"],
    # Then a shard's files were the weights before its step, and the step.
    "diloco": [*_EXCHANGE, "commit 486e575"],
    "diloco-loop": ["commit 486e575"],
    # Then no candidate was scored beyond those that were asked for; then questions were called validation and test;
    # then a question's words decided which it is for; then checksums were XXH3; then a race asked no question twice;
    # then irt was about a part of many questions; then what an adapter had changed was in float32 where models
    # stayed in memory, a tokenizer_source knew fewer embeddings, and models' digest was of their *.safetensors alone.
    "merge-search": [
        *("commit acf0c07", "commit 5fc2cdb", "commit 780815b", "commit 880d80a", "commit 8d4f4b6", "commit 68fd397"),
        "commit 6aa5a97",
    ],
    # Then questions were for validation and test, and bits per byte left out a first token, which nothing predicts;
    # then their words decided which they are for, and passages of the two were no neighbours any more; then checksums
    # were XXH3; then irt was about a part of many questions; then a model called like a stage was another merge, and
    # dfs did not scale what gpt-oss's experts add.
    "evomerge": ["commit 5fc2cdb", "commit 780815b", "commit 880d80a", "commit 68fd397", "commit 6aa5a97"],
}
FIRST = 1  # also of runs that were made before they said it


def kind(algorithm: str) -> int:
    """Which results of a method this code gives."""
    return FIRST + len(LAST.get(algorithm, ()))


def check(folder: Path, run: Mapping[str, Any]) -> None:
    """Refuse a run that this code would go on with in another way; whoever only reads it need not ask."""
    its, algorithm = run.get("results", FIRST), str(run["config"].get("algorithm"))
    if its != kind(algorithm):
        known = dict(enumerate(LAST.get(algorithm, ()), FIRST))
        other = known.get(its, "") if isinstance(its, int) else ""
        other = other or str(run.get("code") or "") or "the version that began it"
        raise UserError(
            f"{folder}: this run has results of kind {its} and this code would give it those of kind "
            f"{kind(algorithm)}: finish it or export from it with {other}, or choose another PROJECT_NAME (--out, "
            "--storage-path) to start a new one."
        )


def code_hash(root: Path = ROOT) -> str:
    """Of all Python that makes a run's results, whether git knows it or not; the same in a clone and installed."""
    total = hashlib.sha256()
    for file in python_in(root):
        total.update(f"{file.relative_to(root)}\n".encode() + hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()
