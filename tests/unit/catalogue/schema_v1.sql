CREATE TABLE deletion (id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, audio_sha256 TEXT,
    name_hash TEXT, requested_at FLOAT NOT NULL, files_removed INTEGER NOT NULL);
CREATE INDEX deletion_files ON deletion (files_removed);
CREATE INDEX deletion_name ON deletion (name_hash);
CREATE TABLE imported_file (file_name TEXT NOT NULL, mtime_ns BIGINT NOT NULL,
    size BIGINT NOT NULL, name_key TEXT, created_at FLOAT, deleted_at FLOAT,
    deletion_id BIGINT, PRIMARY KEY (file_name));
CREATE INDEX imported_file_name ON imported_file (name_key);
CREATE INDEX imported_file_deletion ON imported_file (deletion_id);
CREATE TABLE participant (id TEXT NOT NULL, joined_at FLOAT NOT NULL, PRIMARY KEY (id));
CREATE TABLE schema_version (version INTEGER NOT NULL);
CREATE TABLE speaker (generation INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    tenant TEXT NOT NULL, name_key TEXT NOT NULL, name TEXT NOT NULL, audio_sha256 TEXT,
    num_samples BIGINT NOT NULL, sample_rate_hz INTEGER NOT NULL, ref_text TEXT,
    consent TEXT NOT NULL, description TEXT, mime_type TEXT, original_filename TEXT,
    file_size BIGINT, created_at FLOAT NOT NULL, embedding BLOB,
    UNIQUE (tenant, name_key),
    CHECK ((audio_sha256 IS NULL) <> (embedding IS NULL)));
CREATE INDEX speaker_audio ON speaker (audio_sha256);
CREATE TABLE stored_file (id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,
    audio_sha256 TEXT NOT NULL, kind TEXT NOT NULL, segment TEXT NOT NULL,
    is_audio INTEGER NOT NULL, num_bytes BIGINT NOT NULL, used_at BIGINT NOT NULL,
    created_at FLOAT NOT NULL, UNIQUE (audio_sha256, kind));
CREATE INDEX stored_file_use ON stored_file (segment, is_audio, used_at);
CREATE TABLE usage (segment TEXT NOT NULL, is_audio INTEGER NOT NULL,
    num_files BIGINT NOT NULL, num_bytes BIGINT NOT NULL, PRIMARY KEY (segment, is_audio));
CREATE TABLE confirmation (participant_id TEXT NOT NULL, deletion_id BIGINT NOT NULL,
    PRIMARY KEY (participant_id, deletion_id),
    FOREIGN KEY(participant_id) REFERENCES participant (id),
    FOREIGN KEY(deletion_id) REFERENCES deletion (id));
CREATE INDEX confirmation_deletion ON confirmation (deletion_id);
INSERT INTO schema_version VALUES (1);
