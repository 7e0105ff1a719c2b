-- Did a resume begin at another place in the data than its checkpoint holds?
-- Source: epoch, position and batch hash of the first row against the checkpoint's place and the batches before.
-- An epoch that ended at the checkpoint begins the next one at position 0, which is right.
CREATE OR REPLACE MACRO data_replayed_on_resume(
    replay_threshold := 0 -- batches
) AS TABLE
WITH first_batches AS (
    SELECT
        states.run, states.segment, states.step, states.checkpoint, states.saved_epoch, states.epoch,
        states.saved_data_position, states.data_position,
        max(earlier.step) AS twin_step
    FROM resume_states() AS states
    LEFT JOIN steps AS earlier ON earlier.run = states.run
        AND earlier.rank = 0
        AND earlier.step < states.step
        AND earlier.batch_hash = states.batch_hash
        AND (earlier.epoch = states.epoch OR earlier.epoch = states.saved_epoch)
    GROUP BY ALL
),
replays AS (
    SELECT
        run, segment, step, checkpoint, saved_epoch, epoch, saved_data_position, data_position, twin_step,
        (epoch, data_position) <> (saved_epoch, saved_data_position)
            AND NOT (epoch = saved_epoch + 1 AND data_position = 0) AS is_elsewhere
    FROM first_batches
)
SELECT
    run, -- run directory
    step AS first_step, -- optimizer updates, first step after the resume
    step AS last_step, -- optimizer updates
    'data position' AS subject, -- what was not restored
    CAST(1 AS DOUBLE) AS observed, -- first batches at the wrong place
    CAST(replay_threshold AS DOUBLE) AS threshold, -- batches
    format('segment {} begins at epoch {} position {}, its checkpoint ', segment, epoch, data_position)
        || coalesce(checkpoint || ' ', '') || format('holds epoch {} position {}', saved_epoch, saved_data_position)
        || coalesce(format('; its first batch is that of step {} again', twin_step), '') AS detail -- text
FROM replays
WHERE CAST(is_elsewhere OR twin_step IS NOT NULL AS INTEGER) > replay_threshold
ORDER BY run, step;
