"""SQL statements of the session store. A turn takes two: LOAD when its request arrives, and APPEND
when its reply is sampled."""

from __future__ import annotations

COLUMNS = (
    "id, name, tokenizer, created, used, active, turns, bytes, breaks, read_turns, terms, calls, "
    "tokens"
)

LOAD = f"""
SELECT {COLUMNS}, start,
    ARRAY(SELECT data FROM turns WHERE s.turns > start AND session = s.id AND turn >= start
          ORDER BY turn) AS data,
    ARRAY(SELECT key FROM breaks WHERE s.breaks > broken AND session = s.id AND number > broken
          ORDER BY number) AS keys,
    ARRAY(SELECT cause FROM breaks WHERE s.breaks > broken AND session = s.id AND number > broken
          ORDER BY number) AS causes
FROM sessions AS s, LATERAL (
    SELECT CASE WHEN s.id = $2::bigint THEN $3::integer ELSE 0 END AS start,
           CASE WHEN s.id = $2::bigint THEN $4::integer ELSE 0 END AS broken) AS base
WHERE s.name = $1
"""
"""Session $1 with its turns and breaks; without the first $3 turns and $4 breaks if its id is still
$2, since the gateway has those."""

_WRITE = """, written AS (
    INSERT INTO turns SELECT head.id, $1 + n - 1, data
    FROM head, unnest($2::bytea[]) WITH ORDINALITY AS new (data, n)
), broken AS (
    INSERT INTO breaks SELECT head.id, head.breaks - cardinality($3::bytea[]) + n, key, cause
    FROM head, unnest($3::bytea[], $4::text[]) WITH ORDINALITY AS new (key, cause, n)
    ON CONFLICT DO NOTHING
) SELECT * FROM head
"""

APPEND = f"""
WITH head AS (
    UPDATE sessions SET turns = $1 + cardinality($2::bytea[]),
        breaks = breaks + cardinality($3::bytea[]), bytes = $5, tokens = tokens + $6,
        used = greatest(used, $7), active = greatest(active, $8), tokenizer = $9
    WHERE id = $10 AND turns = $1 AND NOT finished AND (turns = 0 OR tokenizer = $9)
    RETURNING {COLUMNS}
){_WRITE}"""
"""Append turns $2 to session $10, which must have exactly $1 turns; else no row is returned."""

BEGIN = f"""
WITH head AS (
    INSERT INTO sessions (name, tokenizer, created, used, active, turns, bytes, breaks, tokens)
    VALUES ($10, $9, $7, $7, $8, $1 + cardinality($2::bytea[]), $5, cardinality($3::bytea[]), $6)
    ON CONFLICT (name) DO NOTHING
    RETURNING {COLUMNS}
){_WRITE}"""
"""Insert a session named $10 with its first turns; no row is returned if the name is taken."""

CREATE = f"""
INSERT INTO sessions (name, tokenizer, created, used, active, turns, bytes, key_digest, terms)
VALUES ($1, $2, $3, $3, $4, 0, 0, $5, $6)
ON CONFLICT (name) DO NOTHING RETURNING {COLUMNS}
"""

ADD_BREAKS = """
WITH head AS (
    UPDATE sessions SET breaks = breaks + cardinality($2::bytea[]) WHERE id = $1
    RETURNING id, breaks
) INSERT INTO breaks SELECT head.id, head.breaks - cardinality($2::bytea[]) + n, key, cause
FROM head, unnest($2::bytea[], $3::text[]) WITH ORDINALITY AS new (key, cause, n)
ON CONFLICT DO NOTHING
"""

FIND = f"SELECT {COLUMNS} FROM sessions WHERE name = $1"
FIND_KEY = f"SELECT {COLUMNS} FROM sessions WHERE key_digest = $1"
LOCK = f"SELECT {COLUMNS} FROM sessions WHERE id = $1 FOR UPDATE"
SET_TERMS = "UPDATE sessions SET terms = $2, finished = $3 WHERE id = $1"
COUNT_CALLS = """
UPDATE sessions SET calls = calls + $3 WHERE id = $1 AND calls + $3 <= $2 RETURNING calls
"""
MARK_READ = "UPDATE sessions SET read_turns = greatest(read_turns, $2) WHERE id = $1"
PAGE = f"SELECT {COLUMNS} FROM sessions WHERE name > $1 ORDER BY name LIMIT $2"
LATEST = "SELECT name FROM sessions ORDER BY used DESC LIMIT $1"
REMOVE = "DELETE FROM sessions WHERE id = ANY($1::bigint[])"

EXPIRED = "active < $1 AND (read_turns >= turns OR $2)"
FIND_EXPIRED = f"SELECT id, name FROM sessions WHERE {EXPIRED} ORDER BY active LIMIT $3"
# The condition is repeated: a session may have been used since FIND_EXPIRED returned it.
EXPIRE = f"DELETE FROM sessions WHERE {EXPIRED} AND id = ANY($3::bigint[]) RETURNING name"
ONE_GATEWAY = "SELECT pg_try_advisory_xact_lock(hashtextextended($1, 0))"

FACTS = """
INSERT INTO facts (name, value, number) VALUES ('secret', $1, NULL), ('clock', NULL, 0),
    ('sessions', NULL, 0), ('bytes', NULL, 0), ('counted', NULL, 0)
ON CONFLICT (name) DO NOTHING
"""
READ_FACTS = """
SELECT (SELECT value FROM facts WHERE name = 'secret') AS secret,
       (SELECT number FROM facts WHERE name = 'clock') AS clock
"""
SAVE_CLOCK = """
UPDATE facts SET number = greatest(number, $1) WHERE name = 'clock' RETURNING number
"""

# abs: a count from the future, made before the server's clock was set back, is stale as well.
READ_TOTALS = """
SELECT sessions, bytes, counted,
       abs(extract(epoch FROM clock_timestamp()) - counted) >= $1::double precision AS old
FROM (SELECT max(number) FILTER (WHERE name = 'sessions') AS sessions,
             max(number) FILTER (WHERE name = 'bytes') AS bytes,
             max(number) FILTER (WHERE name = 'counted') AS counted FROM facts) AS totals
"""
"""The last count of all sessions, and whether it is older than $1 seconds."""
COUNT_SESSIONS = "SELECT count(*), coalesce(sum(bytes), 0)::double precision FROM sessions"
SAVE_TOTALS = """
UPDATE facts SET number = new.number
FROM (VALUES ('sessions', $1::double precision), ('bytes', $2::double precision),
             ('counted', extract(epoch FROM now())::double precision)) AS new (name, number)
WHERE facts.name = new.name
"""
