-- Was nothing recorded for half an hour?
-- Source: Amazon SageMaker Developer Guide, "List of Debugger built-in rules", StalledTrainingRule: threshold 1800 s
-- (awsdocs/amazon-sagemaker-developer-guide, doc_source/debugger-built-in-rules.md at c6db92f). Offline, a pause counts
-- once it is over; pauses between the segments of a resumed run are none.
CREATE OR REPLACE MACRO stalled_training(
    pause_threshold := 1800 -- s
) AS TABLE
WITH pauses AS (
    SELECT
        run, step,
        epoch_us(wall_time - lag(wall_time) OVER (PARTITION BY run, segment ORDER BY step)) / 1e6 AS pause_seconds
    FROM steps
    WHERE rank = 0
)
SELECT
    run, -- run directory
    step AS first_step, -- optimizer updates
    step AS last_step, -- optimizer updates
    'steps' AS subject, -- table
    pause_seconds AS observed, -- s
    CAST(pause_threshold AS DOUBLE) AS threshold, -- s
    format('{:.0f} s without a row', pause_seconds) AS detail -- text
FROM pauses
WHERE pause_seconds > pause_threshold
ORDER BY run, step;
