-- Preemptions in progress, planned starts, evictions, and the state of namespaces' budgets. Arguments: an action and
-- its arguments; all but `read` and `read_promises` return whether they were done. What is opened claims its devices:
-- `wanted` are rows of {pod, node, uuids, resources, namespace, demand, resources to hold at once, until}. A start
-- replaces others, rows of {id, instant at which it was opened, false: there is none, pods}; the first is of its own
-- id. `open` requires that gangs of which pods end have as many leases as {gang, number, ...}: some may be on nodes
-- that the planner does not see. `save` and `close` require the version that was read. How promised starts have `ended`
-- is recorded in the step that removes them.
-- Keys that a rebuild does not change: preemptions (hash, id -> PreemptionRecord), evictions (stream, the journal of
-- evicted pods, and for which pods), promises (stream, how promised starts have ended), budgets (hash, namespace ->
-- BudgetRecord), leader:SERVICE (string)
local claims = require('claims')
local fair = require('fair')
local gone_pods = require('gone_pods')
local layouts = require('layouts')
local ledger = require('ledger')
local quota = require('quota')
local records = require('records')
local server = require('server')
local values = require('values')
local waiting = require('waiting')
local writes = require('writes')
local call, encode, parse_json = redis.call, cmsgpack.pack, cjson.decode
local B, C, D, N, P = layouts.BUDGET, layouts.CLAIM, layouts.DEVICE, layouts.NODE, layouts.PREEMPTION
local STORE
server.on_begin(function() STORE = server.beside .. '-preemption:' end)
local MAX_ENTRIES = 20000
local MAX_READ = 1000

local function append(stream, texts)
  for _, text in ipairs(texts) do
    call('XADD', STORE .. stream, 'MAXLEN', '~', MAX_ENTRIES, '*', 'text', text)
  end
end

local function is_at(id, version)
  local preemption = values.record(call('HGET', STORE .. 'preemptions', id), P)
  return preemption and preemption[P.VERSION] == version
end

local function put_preemption(id, version, text)
  call('HSET', STORE .. 'preemptions', id, encode({version, text}))
end

local function is_claimable(pod, name, uuids, ended)
  local node = records.node_of(name)
  if not node or node[N.STATUS] ~= 1 or records.lease_of(pod) or claims.of(pod) and not ended[pod]
    or gone_pods.among({pod})[pod] then
    return false
  end
  records.fetch('devices', uuids)
  for _, uuid in ipairs(uuids) do
    local device = records.devices[uuid]
    if not device or device[D.NODE] ~= name or device[D.IS_CLAIMED] then return false end
  end
  return true
end

local actions = {}

-- Claim devices for pods, or nothing; return whether that was done. The claims of some pods may have `ended`.
local function claim_all(wanted, ended)
  local opened = {}
  for i, each in ipairs(wanted) do
    local pod, name, uuids, resources, namespace, demand, at_once, until_s = unpack(each)
    if not is_claimable(pod, name, uuids, ended) then return false end
    if ledger.has_quotas then
      local excesses, charges = quota.check(namespace, demand, 0)
      if excesses then return false end
      if charges then quota.charge(pod, namespace, charges) end -- for the other pods of a gang
    end
    local held = {}
    for r = 1, #resources / 2 do held[r] = 0 end
    local claim = {name, records.nodes[name][N.NUMBER], uuids, at_once, held, until_s}
    claims.mark_devices(claim, true)
    claims.reserve_more(claim)
    claim[C.RESOURCES] = resources
    opened[i] = claim
  end
  quota.discard()
  claims.delete_ended()
  for i, claim in ipairs(opened) do claims.put(wanted[i][1], claim) end
  if #opened > 0 then
    claims.save_count()
    writes.write_changes('claimed')
  end
  return true
end

-- Nothing of this is written yet. Returns the set of the pods that had one.
local function end_claims(pods)
  local ended = {}
  for _, pod in ipairs(pods) do
    local claim = claims.suspend(pod)
    if claim then claims.resume(pod, claim, true) end
    ended[pod] = claim and true
  end
  return ended
end

local function write_ended(ended)
  if next(ended) then
    claims.delete_ended()
    writes.write_changes('claim ended')
  end
end

-- When a planned start was opened; false: there is none.
local function opened_at(id)
  local text = call('HGET', server.prefix .. 'starts', id)
  local is_read, start = pcall(parse_json, text)
  return is_read and start.opened_at
end

function actions.open(id, text, wanted, gangs)
  for gang, count in values.each_pair(gangs) do
    if waiting.gang_lease_count(gang) ~= count then return false end
  end
  if call('HEXISTS', STORE .. 'preemptions', id) == 1 or not claim_all(wanted, {}) then return false end
  put_preemption(id, 1, text)
  return true
end

function actions.open_start(text, wanted, replaced, ended)
  local pods = {}
  for _, each in ipairs(replaced) do
    if opened_at(each[1]) ~= each[2] then return false end
    for _, pod in ipairs(each[3]) do pods[#pods + 1] = pod end
  end
  if not claim_all(wanted, end_claims(pods)) then return false end
  for _, each in ipairs(replaced) do call('HDEL', server.prefix .. 'starts', each[1]) end
  call('HSET', server.prefix .. 'starts', replaced[1][1], text)
  append('promises', ended)
  return true
end

function actions.close_start(id, read_at, pods, ended)
  if opened_at(id) ~= read_at then return false end
  call('HDEL', server.prefix .. 'starts', id)
  append('promises', ended)
  write_ended(end_claims(pods))
  return true
end

function actions.save(id, version, text, evictions)
  if not is_at(id, version) then return false end
  put_preemption(id, version + 1, text)
  append('evictions', evictions)
  return true
end

function actions.close(id, version, pods)
  if not is_at(id, version) then return false end
  call('HDEL', STORE .. 'preemptions', id)
  write_ended(end_claims(pods))
  return true
end

function actions.read(since)
  local preemptions, evictions, budgets = {}, {}, {}
  for id, stored in server.each_record(STORE .. 'preemptions', P) do
    preemptions[#preemptions + 1] = {id, stored[P.VERSION], stored[P.PREEMPTION]}
  end
  for _, entry in ipairs(call('XRANGE', STORE .. 'evictions', string.format('%.0f', since), '+')) do
    evictions[#evictions + 1] = entry[2][2]
  end
  for _, stored in server.each_record(STORE .. 'budgets', B) do budgets[#budgets + 1] = stored[B.BUDGET] end
  return {preemptions, evictions, budgets, call('HVALS', server.prefix .. 'starts'),
    call('HKEYS', server.prefix .. 'claims')}
end

-- Some entries after one, with their ids.
function actions.read_promises(after)
  local rows = {}
  for _, entry in ipairs(call('XRANGE', STORE .. 'promises', '(' .. after, '+', 'COUNT', MAX_READ)) do
    rows[#rows + 1] = {entry[1], entry[2][2]}
  end
  return rows
end

function actions.save_budget(namespace, at, text, is_spent, weight, must_wait)
  local before = values.record(call('HGET', STORE .. 'budgets', namespace), B)
  local time, known_at = server.time(), before and before[B.REPORTED_AT] or 0
  -- A stored time ahead of ours is of a server whose clock was ahead.
  if known_at <= at or known_at > time[1] + 1 then
    call('HSET', STORE .. 'budgets', namespace, encode({at, text}))
    if ledger.is_ready and fair.set_entitlement(namespace, is_spent, weight, must_wait) then
      writes.raise_capacity('budget')
      call('HSET', server.prefix .. 'quota-freed', namespace, ledger.capacity)
      quota.offer(namespace, server.MAX_ARGS)
    end
  end
  return true
end

function actions.lead(service, name, ttl_ms)
  local key = STORE .. 'leader:' .. service
  local leader = call('GET', key)
  if leader and leader ~= name then return false end
  call('SET', key, name, 'PX', ttl_ms)
  return true
end

return function(action, ...) return encode(actions[action](...)) end
