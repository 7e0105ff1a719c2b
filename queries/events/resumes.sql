-- Where a run was started again: the first step of each later segment.
-- Source: segments. Rows of earlier segments from this step on are history, not current.
CREATE OR REPLACE MACRO resumes() AS TABLE
SELECT
    run, -- run directory
    rank, -- process rank
    segment, -- index of the segment that starts here
    first_step AS step -- optimizer updates
FROM segments
WHERE segment > 0 AND first_step IS NOT NULL
ORDER BY run, rank, segment;
