-- A session is a tree of turns. Its column "turns" is its head: an append names the head that it was
-- made on, and is rejected when the head has moved.
CREATE TABLE sessions (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    tokenizer bytea NOT NULL,
    created double precision NOT NULL,
    used double precision NOT NULL,
    active double precision NOT NULL,
    turns integer NOT NULL,
    bytes bigint NOT NULL,
    breaks integer NOT NULL DEFAULT 0,
    read_turns integer NOT NULL DEFAULT 0,
    key_digest bytea UNIQUE,
    terms bytea,
    calls bigint NOT NULL DEFAULT 0,
    tokens bigint NOT NULL DEFAULT 0,
    finished boolean NOT NULL DEFAULT false
) WITH (fillfactor = 70);  -- room for new versions of a row, which then cost no index entry

-- A turn is written once: a checksum and its bytes, not compressed, since ids and logprobs hardly
-- shrink.
CREATE TABLE turns (
    session bigint NOT NULL REFERENCES sessions ON DELETE CASCADE,
    turn integer NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY (session, turn)
);
ALTER TABLE turns ALTER COLUMN data SET STORAGE EXTERNAL;

CREATE TABLE breaks (
    session bigint NOT NULL REFERENCES sessions ON DELETE CASCADE,
    number integer NOT NULL,
    key bytea NOT NULL,
    cause text NOT NULL,
    PRIMARY KEY (session, key)
);

-- Facts about the whole store: the secret that seals thoughts, the service clock, the totals.
CREATE TABLE facts (name text PRIMARY KEY, value bytea, number double precision);

-- API keys of the data port, by digest. Revoked rows stay, so that a store that had keys still
-- requires one.
CREATE TABLE api_keys (
    id text PRIMARY KEY,
    sha256 text NOT NULL UNIQUE,
    tenant text NOT NULL,
    created bigint NOT NULL,
    revoked boolean NOT NULL DEFAULT false
);

-- Control: bodies are JSON.
CREATE TABLE fleet_state (
    id integer PRIMARY KEY,
    body text NOT NULL,
    revision bigint NOT NULL
);

CREATE TABLE operations (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id text NOT NULL UNIQUE,
    key text UNIQUE,
    body text NOT NULL
);

CREATE TABLE members (
    url text PRIMARY KEY,
    body text NOT NULL,
    updated timestamptz NOT NULL DEFAULT now()
);

-- One row: the leader and the end of its lease. "generation" rises at every election.
CREATE TABLE leader (
    id integer PRIMARY KEY,
    holder text NOT NULL,
    address text NOT NULL,
    generation bigint NOT NULL,
    expires timestamptz NOT NULL
);

CREATE TABLE gateways (
    id text PRIMARY KEY,
    address text NOT NULL,
    seen timestamptz NOT NULL DEFAULT now()
);
