-- Did a resume begin with another random state than its checkpoint holds?
-- Source: hashes of the training generator's state, as stored and as found. The run still trains, but is not the
-- run that would have been: dropout and augmentation draw other numbers, or the same ones again.
CREATE OR REPLACE MACRO random_state_lost_on_resume(
    difference_threshold := 0 -- states that differ
) AS TABLE
SELECT
    run, -- run directory
    step AS first_step, -- optimizer updates, first step after the resume
    step AS last_step, -- optimizer updates
    'random generator' AS subject, -- what was not restored
    CAST(1 AS DOUBLE) AS observed, -- states that differ
    CAST(difference_threshold AS DOUBLE) AS threshold, -- states
    format('segment {} begins at step {} with hash {:x}, its checkpoint ', segment, step, rng_hash)
        || coalesce(checkpoint || ' ', '') || format('holds {:x}', saved_rng_hash) AS detail -- text
FROM resume_states()
WHERE CAST(rng_hash <> saved_rng_hash AS INTEGER) > difference_threshold
ORDER BY run, step;
