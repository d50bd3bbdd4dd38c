"""What tenants have, added up from all rows: for a migration, and to put rows right."""

EMPTY = ("DELETE FROM tenant_usage", "DELETE FROM tenant_audio")
# The sums of PostgreSQL are decimal numbers.
FILL = (
    """INSERT INTO tenant_audio (tenant, audio_sha256, num_owners, num_bytes)
    SELECT o.tenant, o.audio_sha256, COUNT(*), COALESCE(MAX(f.num_bytes), 0)
    FROM (SELECT tenant, audio_sha256 FROM speaker WHERE audio_sha256 IS NOT NULL
        UNION ALL SELECT tenant, audio_sha256 FROM consent) o
    LEFT JOIN stored_file f ON f.audio_sha256 = o.audio_sha256 AND f.kind = 'audio'
    GROUP BY o.tenant, o.audio_sha256""",
    """INSERT INTO tenant_usage
    (tenant, num_voices, num_consents, num_pinned, audio_bytes)
    SELECT t.tenant,
    (SELECT COUNT(*) FROM speaker s WHERE s.tenant = t.tenant),
    (SELECT COUNT(*) FROM consent c WHERE c.tenant = t.tenant),
    (SELECT COUNT(*) FROM speaker s WHERE s.tenant = t.tenant AND s.is_pinned = 1),
    CAST((SELECT COALESCE(SUM(a.num_bytes), 0) FROM tenant_audio a
        WHERE a.tenant = t.tenant) AS BIGINT)
    FROM (SELECT tenant FROM speaker UNION SELECT tenant FROM consent) t""",
)
