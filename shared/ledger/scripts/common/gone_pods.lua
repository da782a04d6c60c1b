-- Pods that are gone, so that no event of theirs that is still under way has an effect: the uid of a pod
-- is never used again.
--   gone   zset   pod -> instant at which it was reported as gone, in seconds of this server's clock
local gone_pods = {}
do -- A script may have 200 local names.
local KEPT_S = 600

function gone_pods.add(pods)
  local now, parts = tonumber(call('TIME')[1]), {}
  for _, pod in ipairs(pods) do
    parts[#parts + 1] = now
    parts[#parts + 1] = pod
  end
  write('ZADD', 'gone', parts)
  call('ZREMRANGEBYSCORE', PREFIX .. 'gone', '-inf', now - KEPT_S)
  call('EXPIRE', PREFIX .. 'gone', KEPT_S)
end

-- Return {pod -> true} of those that are gone.
function gone_pods.among(pods)
  local found = {}
  for from = 1, #pods, MAX_ARGS do
    local to = math.min(from + MAX_ARGS - 1, #pods)
    local scores = call('ZMSCORE', PREFIX .. 'gone', unpack(pods, from, to))
    for i = 1, #scores do
      if scores[i] then found[pods[from + i - 1]] = true end
    end
  end
  return found
end
end
