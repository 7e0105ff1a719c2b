-- Learning rate that was applied, beside the one that the declared schedule asks for.
-- Source: steps, rank 0.
CREATE OR REPLACE MACRO learning_rate_by_step() AS TABLE
SELECT
    run, -- run directory
    step, -- optimizer updates before the one that used this rate
    learning_rate, -- 1
    planned_learning_rate -- 1
FROM steps
WHERE rank = 0 AND (learning_rate IS NOT NULL OR planned_learning_rate IS NOT NULL)
ORDER BY run, step;
