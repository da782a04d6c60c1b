-- Pods that rules of other pods select: affinity, anti-affinity and spread. Each is counted as a resource of its node,
-- so a placer has counted those that it has read of. A pod with such a rule gets no lease if more of the selected pods
-- were reserved for since then, or earlier in the same call otherwise than its placer expected.
--   selected  hash  resource -> the last version that reserved for a pod counted as it; without one, it is at most
--     `selected_floor` of the ledger
local ledger = require('ledger')
local lease = require('lease')
local records = require('records')
local server = require('server')
local call = redis.call
local MOST_NAMES = 4096

local M = {}
local of_pods, known, versions, unexpected, reserved

-- Begin a call, for pods with {resources as which each is counted, those of its rules, {resource, pod, ...} of pods
-- that may have a lease that does not count them}, or false for pods without any of these; by what the caller has read.
function M.begin(rules_of_pods, read_version)
  of_pods, known, versions, unexpected, reserved = rules_of_pods, read_version or 0, {}, {}, {}
  if not of_pods then return end
  local names, seen = {}, {}
  for i = 1, #of_pods do
    for _, name in ipairs(of_pods[i] and of_pods[i][2] or {}) do
      if not seen[name] then
        seen[name] = true
        names[#names + 1] = name
      end
    end
  end
  local floor = #names > 0 and server.number_at('ledger', 'selected_floor') or 0
  for i, version in ipairs(server.call_all('HMGET', 'selected', names)) do
    versions[names[i]] = tonumber(version or floor)
  end
end

local function is_uncounted(name, pod)
  records.fetch('leases', {pod})
  local of_pod = records.leases[pod]
  if not of_pod then return false end
  local resources = lease.resources_of(of_pod.request)
  for i = 1, #resources, 2 do
    if resources[i] == name then return false end
  end
  return true
end

-- Why the rules of the i-th pod may not hold any more, or nil. This and `note`: only if there are rules of any pod.
function M.refusal(i)
  local rules = of_pods[i]
  if not rules then return nil end
  for _, name in ipairs(rules[2]) do
    if unexpected[name] or versions[name] > known then return 'selected-pods-changed' end
  end
  for n = 1, #rules[3], 2 do
    if is_uncounted(rules[3][n], rules[3][n + 1]) then return 'selected-pods-uncounted' end
  end
end

-- Note what became of the i-th pod: whether it was reserved for on its first candidate, and on any at all.
function M.note(i, as_expected, is_reserved)
  local rules = of_pods[i]
  if not rules then return end
  for _, name in ipairs(rules[1]) do
    if not as_expected then unexpected[name] = true end
    if is_reserved then reserved[name] = true end
  end
end

-- After the call has reserved something.
function M.write()
  if not of_pods or not next(reserved) then return end
  local version, changes = string.format('%.0f', ledger.version), {}
  for name in pairs(reserved) do
    changes[#changes + 1] = name
    changes[#changes + 1] = version
  end
  local key = server.prefix .. 'selected'
  if call('HLEN', key) > MOST_NAMES then
    call('DEL', key)
    call('HSET', server.prefix .. 'ledger', 'selected_floor', version)
  end
  call('HSET', key, unpack(changes))
end

return M
