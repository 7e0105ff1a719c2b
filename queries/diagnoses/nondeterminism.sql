-- Do two runs of one seed, configuration and environment part, and where first?
-- Source: first_divergence over content hashes; one bit that differs is proof.
CREATE OR REPLACE MACRO nondeterminism(
    difference_threshold := 0 -- quantities
) AS TABLE
SELECT
    run, -- run directory
    min(step) AS first_step, -- optimizer updates
    min(step) AS last_step, -- optimizer updates, whatever comes later follows from it
    arg_min(quantity, step) AS subject, -- first quantity that differs
    CAST(arg_min(difference_count, step) AS DOUBLE) AS observed, -- quantities that differ at that step
    any_value(CAST(difference_threshold AS DOUBLE)) AS threshold, -- quantities
    format(
        'hash {:x} against {:x} in {}, a run of the same seed and configuration; {} quantities differ at step {}',
        arg_min(hash, step), arg_min(other_hash, step), arg_min(other_run, step), arg_min(difference_count, step),
        min(step)
    ) AS detail -- text
FROM first_divergence()
WHERE difference_count > difference_threshold
GROUP BY run
ORDER BY run;
