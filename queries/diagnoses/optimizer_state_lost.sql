-- Did a resume begin with another optimizer state than its checkpoint holds?
-- Source: hashes of all moments and counters, as stored and as found. Moments that start again from zero make the
-- first updates of a resumed run as large as those of a new one, at a learning rate without warmup.
CREATE OR REPLACE MACRO optimizer_state_lost(
    difference_threshold := 0 -- states that differ
) AS TABLE
SELECT
    run, -- run directory
    step AS first_step, -- optimizer updates, first step after the resume
    step AS last_step, -- optimizer updates
    'optimizer state' AS subject, -- what was not restored
    CAST(1 AS DOUBLE) AS observed, -- states that differ
    CAST(difference_threshold AS DOUBLE) AS threshold, -- states
    format('segment {} begins at step {} with hash {:x}, its checkpoint ', segment, step, optimizer_hash)
        || coalesce(checkpoint || ' ', '') || format('holds {:x}', saved_optimizer_hash) AS detail -- text
FROM resume_states()
WHERE CAST(optimizer_hash <> saved_optimizer_hash AS INTEGER) > difference_threshold
ORDER BY run, step;
