-- The learning rate that the manifest declares for each step, beside the planned and the applied one.
-- Source: the peak, final rate, warmup and length that the manifest declares. Null for a schedule of another kind.
CREATE OR REPLACE MACRO declared_rate_by_step() AS TABLE
WITH plans AS (
    SELECT
        run,
        json_extract_string(planned_schedule, '$.kind') AS kind,
        TRY_CAST(json_extract_string(planned_schedule, '$.peak') AS DOUBLE) AS peak,
        TRY_CAST(json_extract_string(planned_schedule, '$.final') AS DOUBLE) AS final,
        TRY_CAST(json_extract_string(planned_schedule, '$.warmup_steps') AS DOUBLE) AS warmup,
        TRY_CAST(json_extract_string(planned_schedule, '$.total_steps') AS DOUBLE) AS total
    FROM runs
)
SELECT
    run, -- run directory
    step, -- optimizer updates before the one that used this rate
    learning_rate, -- 1, finite
    planned_learning_rate, -- 1, finite
    CASE
        WHEN kind NOT IN ('linear warmup, cosine decay', 'linear warmup, constant') THEN NULL
        WHEN step < warmup THEN peak * (step + 1) / warmup
        WHEN kind = 'linear warmup, constant' THEN peak
        ELSE final + (peak - final) * (1 + cos(pi() * least(1, (step - warmup) / greatest(1, total - warmup)))) / 2
    END AS declared_rate -- 1
FROM steps
JOIN plans USING (run)
WHERE rank = 0 AND isfinite(learning_rate) AND isfinite(planned_learning_rate)
ORDER BY run, step;
