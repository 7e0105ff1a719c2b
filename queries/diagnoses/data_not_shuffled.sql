-- Do two epochs in a row visit the examples in the same order?
-- Source: hashes of the order. Two shuffles of n examples agree by chance once in n factorial.
CREATE OR REPLACE MACRO data_not_shuffled(
    repeat_threshold := 0 -- epochs in the order of the epoch before
) AS TABLE
WITH epochs AS (
    SELECT run, epoch, min(step) AS step, max(step) AS end_step, count(*) AS row_count, min(order_hash) AS order_hash
    FROM steps
    WHERE rank = 0 AND order_hash IS NOT NULL AND epoch IS NOT NULL
    GROUP BY run, epoch
),
pairs AS (
    SELECT
        run, epoch, step, end_step, order_hash,
        lag(order_hash) OVER epochs_of_run AS previous_order_hash,
        lag(row_count) OVER epochs_of_run AS previous_row_count,
        count(*) OVER (PARTITION BY run) AS epoch_count
    FROM epochs
    WINDOW epochs_of_run AS (PARTITION BY run ORDER BY epoch)
)
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates, first step of the first repeated epoch
    max(end_step) AS last_step, -- optimizer updates
    'order of the examples' AS subject, -- quantity
    CAST(count(*) AS DOUBLE) AS observed, -- epochs in the order of the epoch before
    any_value(CAST(repeat_threshold AS DOUBLE)) AS threshold, -- epochs
    format(
        'epoch {} has the order of the one before, hash {:x}; so have {} of {} epochs',
        min(epoch), arg_min(order_hash, epoch), count(*), any_value(epoch_count)
    ) AS detail -- text
FROM pairs
WHERE order_hash = previous_order_hash AND previous_row_count > 1 -- one batch an epoch has no order to shuffle
GROUP BY run
HAVING count(*) > any_value(repeat_threshold)
ORDER BY run;
