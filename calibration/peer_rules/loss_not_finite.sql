-- Is a training loss NaN or infinite?
-- Source: the check that most loops carry: `if not math.isfinite(loss)`.
CREATE OR REPLACE MACRO loss_not_finite(
    row_count_threshold := 0 -- steps
) AS TABLE
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    max(step) AS last_step, -- optimizer updates
    'train_loss' AS subject, -- quantity
    CAST(count(*) AS DOUBLE) AS observed, -- steps
    any_value(CAST(row_count_threshold AS DOUBLE)) AS threshold, -- steps
    format('first {}', arg_min(train_loss, step)) AS detail -- text
FROM steps
WHERE rank = 0 AND NOT isfinite(train_loss)
GROUP BY run
HAVING count(*) > any_value(row_count_threshold)
ORDER BY run;
