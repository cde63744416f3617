"""Writes docs/failure-modes.md: what goes wrong elsewhere, what Lockstep does, which tests prove it.

python scripts/failure_modes.py            # rewrite the page
python scripts/failure_modes.py --check    # fail unless it is up to date and complete
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "failure-modes.md"
MARK = re.compile(r'failure_mode\("(F\d\d)"\)')
TEST = re.compile(r"(?:async )?def (test_\w+)")
MODES: dict[str, tuple[str, str]] = {
    "F01": ("the same history as dicts, pydantic objects or with None-valued keys is taken for another one", "messages are compared in canonical form: it matches and is bridged"),
    "F02": ("an edited history is re-rendered and trained on as if nothing had happened", "a prefix break with its cause: refused, or forked, counted and logged once"),
    "F03": ("cache_salt is dropped on the way", "reaches the engine once, from every place a dialect has for it"),
    "F04": ("priority is dropped, or arrives with the wrong sign", "reaches the engine once, in that dialect's place and sign"),
    "F05": ("a null among the logprobs is skipped and the list gets shorter", "an error with the position; the list is never shortened"),
    "F06": ("ids and logprobs of different length are zipped", "an error with both lengths"),
    "F07": ("the logprob belongs to another token than the id at its place", "an error with the position"),
    "F08": ("no token ids came, so they are made from text", "an error: ids are never made from text"),
    "F09": ("present but empty ids are taken for missing", "a valid completion of zero tokens"),
    "F10": ("a token-in request is tokenized again from its placeholder message", "the prompt ids are the ids supplied"),
    "F11": ("with n > 1 all choices get the ids of the first", "each choice has its own ids and logprobs, matched by index"),
    "F12": ("an aborted answer is trained on as if it had stopped", "finish `abort`, tokens kept, masked by default, continued token for token on request"),
    "F13": ("an answer or stream without a finish reason passes as complete", "an error"),
    "F14": ("stop strings on a Dynamo frontend lose the engine data", "refused with the way out: stop by token ids"),
    "F15": ("NaN, infinite or sentinel logprobs enter the loss", "an error with the position, or kept and flagged when asked for"),
    "F16": ("raw and processed logprobs, or temperatures, are mixed in one sample", "mode and temperature are on the completion; such a sample is refused"),
    "F17": ("a prompt without room is cut or fails deep in the engine", "refused before it is sent, with both numbers; a failed look-up is not remembered for ever"),
    "F18": ("empty, negative, out-of-vocabulary or non-integer ids are coerced", "400 that names the first bad one"),
    "F19": ("tokens and logprobs vanish when tool calls are parsed out", "finish `tool_calls`, ids and logprobs whole, in streams too"),
    "F20": ("the template drops earlier thinking and the prefix silently changes", "kept by default; else a break `thinking_dropped`"),
    "F21": ("closing tokens put into the prompt after a cut turn are trained on", "they are in the prompt, masked as not sampled"),
    "F22": ("an operation over no workers succeeds", "503"),
    "F23": ("200 with status error, or null, counts as done", "a failure"),
    "F24": ("an update that fails on one worker leaves a mixed fleet", "rolled back or quarantined; the answer says who and why"),
    "F25": ("a retried update is applied twice", "the same key gives the same answer; a lost answer is looked up"),
    "F26": ("a worker that joins or restarts serves old weights", "no traffic before it holds the desired version and adapters, proved"),
    "F27": ("KV of old weights is used for tokens of new ones", "caches are keyed by the weights' epoch, and running requests are computed anew"),
    "F28": ("an engine takes the weights and is silently wrong", "the probe catches it; the worker is quarantined"),
    "F29": ("a failed adapter swap serves the base model", "the old adapter goes on and the answer says so, or 404; never the base model"),
    "F30": ("the same adapter path with new contents hits stale caches", "new contents, keyed by what was loaded"),
    "F31": ("an unknown adapter is answered by the base model", "404"),
    "F32": ("ten thousand adapter names leave state behind", "nothing is left"),
    "F33": ("weights are loaded from anywhere", "4xx for empty, missing, relative, outside the roots, through a symlink; nothing touched"),
    "F34": ("half a checkpoint is loaded", "refused in validate: missing shard, truncated, shapes, dtypes, NaN; nothing touched"),
    "F35": ("a dying worker loses requests, or repeats delivered ones", "a typed error; tried elsewhere only if nothing was delivered"),
    "F36": ("one worker that hangs in pause wedges the fleet", "bounded; the others are not left paused"),
    "F37": ("a dead trainer leaves the fleet paused for ever", "the lease ends and the fleet resumes at its last proved version"),
    "F38": ("routed experts in another form, or with wrong rows, corrupt the sample", "one form, trimmed once, rows checked; a bad one fails the turn before anything is stored"),
    "F39": ("an unknown id detokenizes to nothing", "400 that names it"),
    "F40": ("tokens that are parts of a character lose their bytes", "token strings are lossless, and the bytes are given"),
    "F41": ("/tokenize takes contradicting forms and flags", "400; vLLM's defaults otherwise"),
    "F42": ("anybody can call admin routes", "401, 403 or 405; own listener, own token, loopback by default"),
    "F43": ("tokens of an in-flight update carry one version", "each token its own; a request may demand a version or a floor"),
    "F44": ("logprobs are rounded on some hop", "bit-identical to what the engine computed"),
    "F45": ("two requests with one id overwrite each other; abort counts what was asked", "both answered; abort says how many it really stopped"),
    "F46": ("scoring takes the first entry instead of the token's own", "the token's own entry, the first position handled, temperature on record"),
    "F47": ("the client goes away and the engine goes on", "the request stops; nothing leaks"),
    "F48": ("in bf16 a worker on the old, or on partly old weights passes for one on the new", "the weights that it computes with are read back and compared; without that, judged against new and old logprobs within its own measured noise"),
    "F49": ("a step too small for bf16 logprobs proves nothing, or stops the run", "proved by reading back the weights that it computes with, by the digest of that memory, or refused"),
    "F50": ("a version label with `+`, a newline, an escape or 100 kB is taken, and then cut apart or printed", "400 where it enters; one grammar joins and parses labels"),
    "F51": ("a second run reuses `step_1` with other weights, and is refused for good or taken for the first", "a label names contents: the directory's name gets the digest added, and the operation says so; a label that the trainer chose stays strict"),
    "F52": ("an overlong prompt is taken for a passing fault and sent ten times", "the wording and the code that clients match, on every route"),
    "F53": ("one turn at another temperature makes a whole session unreadable", "that branch is split, with the reason, or the turn refused where the session is strict; the others come out as they are"),
    "F54": ("a malformed tool call is shown as a plain answer, and the text after it is lost", "what was not parsed stays in the content verbatim, and the turn says `tool_parse_error`; streams the same"),
    "F55": ("turns that several branches share are trained several times", "each token is trained in one sample; the others say in which"),
    "F56": ("a session id is accepted and recorded nowhere", "on every route it is recorded; turns of token ids join the session by their ids"),
    "F57": ("a harness puts a counter, a date or a cache marker into its prompt, and every turn breaks the prefix", "parts that mean nothing are recognised and folded at the edge, and the response says so"),
    "F58": ("a compaction of the history is taken for an edit, or trained as one trajectory with what it replaced", "what follows a summary is a branch of kind `compaction`, whose parent is the branch it replaced"),
    "F59": ("turns of a sub-agent, a title, a summary or a thrown-away attempt are mixed into the main line", "every branch has a kind, a parent and the evidence; each turn is trained in its own branch, an attempt that was not used in none"),
    "F60": ("results of parallel tool calls come back in another order, or split over messages", "matched by the ids of their calls: the prompt stays append-only"),
    "F61": ("two gateways drive one fleet against each other", "each start or election has a higher generation number; workers refuse the lower ones, and that gateway stands down; on one store one gateway leads"),
    "F62": ("a late commit of a gateway that was replaced is carried out", "refused by the worker, which has obeyed a later generation"),
    "F64": ("one key reads, joins, poisons or aborts what belongs to another, or measures what it cached", "not found: sessions, request ids and cached prompts are per tenant; a session key opens one session"),
    "F65": ("exactness claimed on a CPU or GPU where it does not hold", "a self-test with the trainer's path; close mode is said everywhere, with its reason"),
    "F66": ("a stop string ends the text, and the tokens behind it no longer fit it", "the engine ends with the token that completes it; ids and logprobs stay whole, the text is cut, streams hold back"),
    "F67": ("output held to a schema is scored as if the model had been free", "the completion says which grammar was on; its processed logprobs are after the mask and score again"),
    "F71": ("logprobs are of another distribution than tokens were drawn from, and nobody says so", "processed by default, said on card and completion, with all that shaped them; scored again bit for bit"),
    "F72": ("control reaches another worker than discovery meant, as an address is only good on its own host", "a worker that advertises such an address is refused, and one is believed only when it says that it is the one; the reason is in output and state"),
    "F73": ("a worker that lost its lease ends as if its command had been wrong, and no supervisor starts it again", "exit code 75; supervisors wait for what it needs and start it again, and it is proved before it serves"),
    "F74": ("a leader dies in the middle of an update, and leaves workers paused or of two versions", "the next one tells every worker its number, finishes what was recorded and undoes the rest; requests wait, and none fails"),
    "F75": ("a gateway that does not decide uses a worker that is not proved, or takes an answer that nobody accepted", "it follows what the leader wrote in one transaction, and looks before it takes or refuses a version"),
    "F70": ("a trainer on another CPU type than the workers believes itself exact", "how both compute is compared before the first step"),
    "F80": ("a training call that is sent again, or chunks that arrive out of order, count twice or in the wrong order", "calls of a model run by their number, each once, whatever arrives when"),
    "F81": ("part of a batch is refused, and the step after it learns from the rest", "a refused chunk leaves no gradient, and the step that counts on it is refused too"),
    "F82": ("a sampler changes, or is gone, because later ones need its place", "samplers never change: the least used one waits on disk and is loaded and proved again"),
    "F83": ("a trainer that was restarted goes on from old weights as if nothing had happened", "its clients are told what is lost, and from which saved state to go on"),
    "F84": ("an engine dies of a proof, or of prompt logprobs, beside other requests, as it may adapt the head", "engines of a trainer are started without it, others are refused, and clients are told when they create a model"),
    "F85": ("adapters are trained on one base and sampled on another, as the weights of the fleet were updated", "samples are refused while the fleet serves other weights than those that are trained on"),
    "F76": ("a worker's impossible response (positive logprob, id outside the vocabulary, more tokens than allowed) becomes a sample, or a 400 to the client", "the worker is at fault: 502 that names it, counted, ejected; nothing stored"),
    "F90": ("a collector of traces that hangs or is down slows or fails requests", "spans wait in a bounded queue for a thread of their own and are dropped; the end waits three seconds"),
    "F91": ("a tracker that fails in mid-run ends it, or its metrics are lost", "told once, then left out; the run goes on and its directory has every line"),
    "F92": ("turns of one session that meet several gateways overwrite each other, or are taken for an edited history", "every gateway reads the turns it does not know before it plans; a turn is stored only behind the head it was made on, and else behind the newer ones"),
    "F97": ("a request that ends its worker is retried until no worker is left", "never sent to a third worker; its digest is refused for five minutes"),
}  # fmt: skip


def marked() -> dict[str, list[str]]:
    """Test modules and names by failure mode."""
    tests: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        pending: list[str] = []
        for line in path.read_text().splitlines():
            pending += MARK.findall(line)
            if (test := TEST.match(line)) and pending:
                for mode in pending:
                    where = path.relative_to(ROOT / "tests")
                    tests.setdefault(mode, []).append(f"{where}::{test[1]}")
                pending = []
    return tests


def page() -> str:
    tests = marked()
    lines = [
        "# Failure modes",
        "",
        "Each was seen in a real system of this field, and each has tests that provoke it (marked `failure_mode`).",
        "This page is written by `scripts/failure_modes.py`.",
        "",
        "| id | elsewhere | Lockstep | tests |",
        "|---|---|---|---|",
    ]
    for mode, (wrong, right) in sorted(MODES.items()):
        named = tests.get(mode, [])
        first = named[0] if named else "none yet"
        more = f" and {len(named) - 1} more" if len(named) > 1 else ""
        lines.append(f"| {mode} | {wrong} | {right} | `{first}`{more} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    missing = sorted(set(MODES) - set(marked()))
    unknown = sorted(set(marked()) - set(MODES))
    if unknown:
        raise SystemExit(f"tests are marked with unknown failure modes: {', '.join(unknown)}")
    if "--check" in sys.argv:
        if missing:
            raise SystemExit(f"no test is marked with {', '.join(missing)}")
        if PAGE.read_text() != page():
            raise SystemExit("docs/failure-modes.md is not up to date: run this script")
        return
    PAGE.write_text(page())
    print(f"{len(MODES)} modes; without a test: {', '.join(missing) or 'none'}")


if __name__ == "__main__":
    main()
