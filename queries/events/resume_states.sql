-- What each resume found and what it should have found: the checkpoint's state beside the segment's first row.
-- Source: event `resumed`, whose payload carries the state as the checkpoint stored it, hashes as decimal text;
-- the first row of a segment is written before its first update, so the two describe the same moment.
CREATE OR REPLACE MACRO resume_states() AS TABLE
WITH checkpoints AS (
    SELECT
        run, rank, segment,
        arg_max(payload, coalesce(wall_time, TIMESTAMPTZ '1970-01-01')) AS payload -- the last one, if there are more
    FROM events_all
    WHERE kind = 'resumed' AND rank = 0 AND json_valid(payload)
    GROUP BY run, rank, segment
)
SELECT
    checkpoints.run, -- run directory
    segment, -- index of the segment that was begun
    first_step AS step, -- optimizer updates, first step of the segment
    json_extract_string(payload, '$.checkpoint') AS checkpoint, -- name of the checkpoint
    TRY_CAST(json_extract_string(payload, '$.optimizer_hash') AS UBIGINT) AS saved_optimizer_hash, -- 64-bit hash
    optimizer_hash, -- 64-bit hash
    TRY_CAST(json_extract_string(payload, '$.rng_hash') AS UBIGINT) AS saved_rng_hash, -- 64-bit hash
    rng_hash, -- 64-bit hash
    TRY_CAST(json_extract_string(payload, '$.epoch') AS BIGINT) AS saved_epoch, -- passes
    epoch, -- passes
    TRY_CAST(json_extract_string(payload, '$.data_position') AS BIGINT) AS saved_data_position, -- examples
    data_position, -- examples
    order_hash, -- 64-bit hash
    batch_hash -- 64-bit hash
FROM checkpoints
JOIN segments USING (run, rank, segment)
JOIN steps USING (run, rank, segment)
WHERE step = first_step
ORDER BY checkpoints.run, segment;
