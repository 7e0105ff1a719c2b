-- Are examples of another split in the training data?
-- Source: hashes of full token sequences; two unlike sequences share one of 64 bits with probability 5e-20.
CREATE OR REPLACE MACRO train_validation_leak(
    shared_threshold := 0, -- examples
    train_split := 'train' -- name of the split that is trained on
) AS TABLE
WITH trained AS (
    SELECT run, content_hash, min(example_id) AS twin_id
    FROM examples
    WHERE split = train_split AND content_hash IS NOT NULL
    GROUP BY run, content_hash
),
others AS (
    SELECT
        run, split, example_id, content_hash,
        count(*) OVER (PARTITION BY run, split) AS example_count
    FROM examples
    WHERE split <> train_split AND content_hash IS NOT NULL
),
started AS (
    SELECT run, min(step) AS step FROM steps WHERE rank = 0 GROUP BY run
)
SELECT
    others.run, -- run directory
    coalesce(any_value(started.step), 0) AS first_step, -- optimizer updates, the leak is there from the start
    coalesce(any_value(started.step), 0) AS last_step, -- optimizer updates
    split AS subject, -- data split
    CAST(count(*) AS DOUBLE) AS observed, -- examples of the split that are trained on
    any_value(CAST(shared_threshold AS DOUBLE)) AS threshold, -- examples
    format('{} of {} examples are in {} too: ', count(*), any_value(example_count), train_split)
        || array_to_string(
            list(format('{} = {}', example_id, twin_id) ORDER BY example_id)[1:4], ', '
        ) || CASE WHEN count(*) > 4 THEN ', ...' ELSE '' END AS detail -- text, ids in the split and in training
FROM others
JOIN trained USING (run, content_hash)
LEFT JOIN started ON started.run = others.run
GROUP BY others.run, split
HAVING count(*) > any_value(shared_threshold)
ORDER BY others.run, split;
