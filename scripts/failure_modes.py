"""Write docs/failure-modes.md: failures of other systems, what Lockstep does, and the tests of it.

python scripts/failure_modes.py            # rewrite the page
python scripts/failure_modes.py --check    # fail unless it is up to date and complete
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "failure-modes.md"
MARK = re.compile(r'failure_mode\("(F\d{2,})"\)')
TEST = re.compile(r"(?:async )?def (test_\w+)")
MODES: dict[str, tuple[str, str]] = {
    "F01": ("the same history as dicts, pydantic objects or with None-valued keys is treated as a different one", "messages are compared in canonical form: it matches and is bridged"),
    "F02": ("an edited history is re-rendered and trained on silently", "a prefix break with its cause: rejected, or forked, counted and logged once"),
    "F03": ("cache_salt is dropped between client and engine", "reaches the engine once, from every field that a dialect has for it"),
    "F04": ("priority is dropped, or arrives with the wrong sign", "reaches the engine once, in the field and with the sign of its dialect"),
    "F05": ("a null among the logprobs is skipped and the list gets shorter", "an error with the position; the list is never shortened"),
    "F06": ("ids and logprobs of different length are zipped", "an error with both lengths"),
    "F07": ("a logprob belongs to another token than the id at the same position", "an error with the position"),
    "F08": ("token ids are missing, so they are made from text", "an error: ids are never made from text"),
    "F09": ("empty ids are treated as missing", "a valid completion of zero tokens"),
    "F10": ("a token-in request is tokenized again from its placeholder message", "the prompt ids are the ids supplied"),
    "F11": ("with n > 1 all choices get the ids of the first", "each choice has its own ids and logprobs, matched by index"),
    "F12": ("an aborted answer is trained on as if it had stopped", "finish `abort`, tokens kept, masked by default, continued token for token on request"),
    "F13": ("an answer or stream without a finish reason passes as complete", "an error"),
    "F14": ("stop strings on a Dynamo frontend lose the engine data", "rejected with the alternative: stop by token ids"),
    "F15": ("NaN, infinite or sentinel logprobs enter the loss", "an error with the position, or kept and flagged on request"),
    "F16": ("raw and processed logprobs, or temperatures, are mixed in one sample", "mode and temperature are on the completion; such a sample is rejected"),
    "F17": ("a prompt that leaves no room for a reply is cut, or fails deep in the engine", "rejected before it is sent, with both numbers; a failed lookup is not cached for ever"),
    "F18": ("empty, negative, out-of-vocabulary or non-integer ids are coerced", "400 that names the first bad one"),
    "F19": ("tokens and logprobs vanish when tool calls are parsed out", "finish `tool_calls`, ids and logprobs whole, in streams too"),
    "F20": ("the template drops earlier thinking and the prefix silently changes", "kept by default; else a break `thinking_dropped`"),
    "F21": ("closing tokens put into the prompt after a cut turn are trained on", "they are in the prompt, masked as not sampled"),
    "F22": ("an operation over no workers succeeds", "503"),
    "F23": ("200 with status error, or null, counts as done", "a failure"),
    "F24": ("an update that fails on one worker leaves a mixed fleet", "rolled back or quarantined; the response names the workers and the reasons"),
    "F25": ("a retried update is applied twice", "the same key gives the same response; a lost response is looked up"),
    "F26": ("a worker that joins or restarts serves old weights", "no traffic before it holds the desired version and adapters, proved"),
    "F27": ("KV of old weights is used for tokens of new ones", "caches are keyed by the weights' epoch, and running requests are recomputed"),
    "F28": ("an engine takes the weights and is silently wrong", "the probe catches it; the worker is quarantined"),
    "F29": ("a failed adapter swap serves the base model", "the old adapter stays and the response says so, or 404; never the base model"),
    "F30": ("the same adapter path with new contents hits stale caches", "new contents, keyed by what was loaded"),
    "F31": ("an unknown adapter is answered by the base model", "404"),
    "F32": ("ten thousand adapter names leave state behind", "nothing is left"),
    "F33": ("weights are loaded from anywhere", "4xx for empty, missing, relative, outside the roots, through a symlink; nothing touched"),
    "F34": ("half a checkpoint is loaded", "rejected in validate: missing shard, truncated, shapes, dtypes, NaN; nothing touched"),
    "F35": ("a dying worker loses requests, or repeats delivered ones", "a typed error; retried elsewhere only if nothing was delivered"),
    "F36": ("one worker that hangs in pause wedges the fleet", "bounded; the others are not left paused"),
    "F37": ("a dead trainer leaves the fleet paused for ever", "the lease ends and the fleet resumes at its last proved version"),
    "F38": ("routed experts in another form, or with wrong rows, corrupt the sample", "one form, trimmed once, rows checked; a bad one fails the turn before anything is stored"),
    "F39": ("an unknown id detokenizes to nothing", "400 that names it"),
    "F40": ("tokens that are parts of a character lose their bytes", "token strings are lossless, and responses have the bytes"),
    "F41": ("/tokenize takes contradicting forms and flags", "400; vLLM's defaults otherwise"),
    "F42": ("any client can call admin routes", "401, 403 or 405; own listener, own token, loopback by default"),
    "F43": ("tokens of an in-flight update carry one version", "each token its own; a request may demand a version or a floor"),
    "F44": ("logprobs are rounded on some hop", "bit-identical to what the engine computed"),
    "F45": ("two requests with one id overwrite each other; abort reports the requested count", "both are answered; abort reports how many it stopped"),
    "F46": ("scoring takes the first entry instead of the token's own", "the token's own entry, the first position handled, temperature on record"),
    "F47": ("the client disconnects and the engine continues", "the request is aborted; nothing leaks"),
    "F48": ("in bf16 a worker on the old, or on partly old weights is accepted as one on the new", "the weights that it computes with are read back and compared; without that, judged against new and old logprobs within its own measured noise"),
    "F49": ("a step too small for bf16 logprobs proves nothing, or stops the run", "proved by reading back the weights that it computes with, by the digest of that memory, or rejected"),
    "F50": ("a version label with `+`, a newline, an escape or 100 kB is accepted, and then split or printed", "400 at the edge; one grammar joins and parses labels"),
    "F51": ("a second run reuses `step_1` with other weights, and is rejected for ever or treated as the first", "a label names contents: the directory's name gets the digest added, and the operation says so; a label that the trainer chose stays strict"),
    "F52": ("an overlong prompt is treated as a transient fault and retried ten times", "the wording and the code that clients match, on every route"),
    "F53": ("one turn at another temperature makes a whole session unreadable", "that branch is split, with the reason, or the turn is rejected in a strict session; other branches are unaffected"),
    "F54": ("a malformed tool call is shown as a plain answer, and the text after it is lost", "unparsed text stays in the content verbatim, and the turn has `tool_parse_error`; the same in streams"),
    "F55": ("turns that several branches share are trained several times", "each token is trained in one sample; the others say in which"),
    "F56": ("a session id is accepted and recorded nowhere", "recorded on every route; turns of token ids join the session by their ids"),
    "F57": ("a harness puts a counter, a date or a cache marker into its prompt, and every turn breaks the prefix", "parts that mean nothing are recognised and folded at the edge, and the response says so"),
    "F58": ("a compaction of the history is treated as an edit, or trained as one trajectory with what it replaced", "what follows a summary is a branch of kind `compaction`, whose parent is the branch it replaced"),
    "F59": ("turns of a sub-agent, a title, a summary or a thrown-away attempt are mixed into the main line", "every branch has a kind, a parent and the evidence; each turn is trained in its own branch, an attempt that was not used in none"),
    "F60": ("results of parallel tool calls come back in another order, or split over messages", "matched by the ids of their calls: the prompt stays append-only"),
    "F61": ("two gateways drive one fleet against each other", "each start or election has a higher generation number; workers reject lower ones, and that gateway steps down; gateways that share a store have one leader"),
    "F62": ("a late commit of a replaced gateway is executed", "rejected by the worker, which has accepted a later generation"),
    "F63": ("a delta is applied to another base, twice, or out of order", "rejected by digest with the name of the tensor and the link; nothing is staged"),
    "F64": ("one key reads, joins, poisons or aborts what belongs to another, or measures what it cached", "not found: sessions, request ids and cached prompts are per tenant; a session key opens one session"),
    "F65": ("exactness claimed on a CPU or GPU where it does not hold", "a self-test with the trainer's path; close mode is reported everywhere, with its reason"),
    "F66": ("a stop string ends the text, and the tokens behind it no longer fit it", "the engine ends with the token that completes it; ids and logprobs stay whole, the text is cut, streams hold back"),
    "F67": ("output constrained by a schema is scored as if it were unconstrained", "the completion says which grammar was on; its processed logprobs are after the mask and score again"),
    "F68": ("an engine dies of an id outside the vocabulary, or of a truncated checkpoint", "both are checked before they are sent; a death is reported, and the server is restarted, brought to the accepted version and proved"),
    "F69": ("an engine updates weights and keeps KV of the old ones under the new label (in-place pause)", "never used: requests are retracted and the cache is flushed, then the weights are proved"),
    "F71": ("logprobs are of another distribution than tokens were drawn from, without notice", "processed by default, stated on model card and completion with all options that shaped them; rescored bit for bit"),
    "F72": ("control reaches another worker than discovery meant, because an address is valid only on its own host", "a worker that advertises such an address is rejected, and a worker is accepted only if it confirms its id; the reason is in output and state"),
    "F73": ("a worker that lost its lease ends as if its command had been wrong, and no supervisor restarts it", "exit code 75; supervisors wait for its dependencies and restart it, and it is proved before it serves"),
    "F74": ("a leader dies in the middle of an update, and leaves workers paused or of two versions", "the next leader sends every worker its generation, finishes recorded steps and rolls back the rest; requests wait, and none fails"),
    "F75": ("a follower gateway uses a worker that is not proved, or accepts a response of a version that was not accepted", "it follows the state that the leader wrote in one transaction, and reads it before it accepts or rejects a version"),
    "F70": ("a trainer on another CPU type than the workers claims to be exact", "the arithmetic of both is compared before the first step"),
    "F79": ("a sharded trainer proves other weights than it published, because it gathered them before a step, or casts them elsewhere", "one forward pass of all ranks, with weights gathered anew and rounded as they are written; ranks of an exact model that disagree are named"),
    "F80": ("a retried training call, or chunks that arrive out of order, count twice or in the wrong order", "calls of a model run once each, in the order of their numbers"),
    "F81": ("part of a batch is rejected, and the next step learns from the rest", "a rejected chunk leaves no gradient, and the step that needs it is rejected too"),
    "F82": ("a sampler changes or disappears because later ones need its slot", "samplers never change: the least used one is stored on disk, and loaded and proved again on use"),
    "F83": ("a trainer that was restarted silently continues from old weights", "clients get an error that names the lost state and the last saved one"),
    "F84": ("an engine whose head may be adapted crashes on a proof, or on prompt logprobs, in a batch with other requests", "engines of a trainer are started without head adapters, others are rejected, and creating such a model is an error"),
    "F85": ("adapters are trained on one base and sampled on another, because the weights of the fleet were updated", "sampling is rejected while the fleet serves other weights than those that are trained on"),
    "F86": ("a slice of a sharded checkpoint is missing, doubled, or of another step or rank", "rejected with the name of the tensor, the slice and the rank; nothing is staged"),
    "F87": ("a rank never writes its part of a checkpoint, and everything waits forever", "the wait is bounded, the rank is named, and the fleet keeps its weights"),
    "F88": ("an object of a store is half uploaded, truncated or replaced", "every object is compared with its size and digest before use, and named; the fleet keeps its weights"),
    "F89": ("a chain of deltas is pruned under a worker that still needs it", "pruning keeps what a chain needs; a joiner uses a full checkpoint of the same weights, or is refused with the name of the link"),
    "F90": ("a collector of traces that hangs or is down slows or fails requests", "spans wait in a bounded queue for a thread of their own and are dropped; shutdown waits at most three seconds"),
    "F91": ("a tracker that fails in mid-run ends it, or its metrics are lost", "reported once, then disabled; the run continues and its directory has every line"),
    "F92": ("turns of one session on several gateways overwrite each other, or are treated as an edited history", "every gateway reads new turns before it plans; a turn is stored only after the head it was planned on, otherwise after the newer turns"),
    "F77": ("a run is called reproducible though something in it (tool, clock, judge) is not", "such inputs are recorded, replayed from the record, and named as such"),
    "F78": ("a mismatch is blamed on the wrong cause", "a cause is named only when its substitution leaves nothing but measured noise; else the verdict is \"not explained\""),
    "F76": ("a worker's impossible response (positive logprob, id outside the vocabulary, more tokens than allowed) becomes a sample, or a 400 to the client", "the worker is at fault: 502 that names it, counted, ejected; nothing stored"),
    "F97": ("a request that ends its worker is retried until no worker is left", "never sent to a third worker; its digest is refused for five minutes"),
    "F98": ("a turn cut in mid-stream is lost although the agent acts on it", "kept as aborted with its tokens, logprobs and versions; it is that turn, up to there, when the agent continues from it"),
    "F99": ("text that looks like control tokens becomes control tokens, so that a file can forge turns", "messages are encoded as text, whatever they spell out; control tokens come from the template only"),
    "F100": ("logprobs of a truncated or masked distribution are compared with those of the whole vocabulary, or of sets selected again under other weights", "the set that each token was drawn from is recorded and replayed; a sample without it is marked, and training on it is an error"),
    "F101": ("tokens that a correction rejects stay in the denominator unnoticed", "`loss.rejected` says whether they count in the mean; metrics have both counts, and what each correction touched"),
}  # fmt: skip


def marked() -> dict[str, list[str]]:
    """Return the marked tests by failure mode."""
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
        "Each failure was seen in a real system of this field, and has tests that provoke it (marked `failure_mode`).",
        "This page is written by `scripts/failure_modes.py`.",
        "",
        "| id | elsewhere | Lockstep | tests |",
        "|---|---|---|---|",
    ]
    for mode, (wrong, right) in sorted(MODES.items(), key=lambda item: int(item[0][1:])):
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
