-- Quotas: the maximum use of a namespace's live leases, on all devices and on those of each model. Without
-- any quota, nothing below is called. A lease's charge is stored until the lease ends, even if its quota
-- or its devices change, so that no lease is read again.
--   (PREFIX)-quotas  hash  (not changed by a rebuild) namespace -> QuotaRecord
--   ledger           hash  quotas: their number
--   quota-charges    hash  pod -> ChargesRecord
--   quota-used       hash  namespace -> {bucket -> UsageRecord}
--   quota-freed      hash  namespace -> capacity number at which it last had more left of its quota
--   quota-offers     hash  namespace -> how often its waiting pods are still to be offered that
-- A bucket is '' (all devices) or the name of a model. Pods that wait for a quota have the group
-- 'q:|NAMESPACE', or 'q:GROUP|NAMESPACE' if capacity freed where the quota allows it may help them, too.
local capacity = require('capacity')
local constants = require('constants')
local layouts = require('layouts')
local lease = require('lease')
local ledger = require('ledger')
local server = require('server')
local values = require('values')
local waiting = require('waiting')
local call, encode, parse_json = redis.call, cmsgpack.pack, cjson.decode
local D, E, Q, U = layouts.DEVICE, layouts.EXCESS, layouts.QUOTA, layouts.USAGE
local CHARGE, CHARGES = layouts.CHARGE, layouts.CHARGES
local B, DEMAND, REQUEST = layouts.BOOKING, layouts.DEMAND, layouts.REQUEST
local EXCLUSIVE = constants.EXCLUSIVE

local M = {}
local rules, used_by, node_kinds, charges, freed, changed
local waiting_groups -- of the namespaces whose pods wait for their quotas; nil: not read yet

-- Discard counts that must not be written.
function M.discard() used_by, charges, freed, changed = {}, {}, {}, {} end

server.on_begin(function()
  M.rules_key = server.beside .. '-quotas'
  rules, node_kinds, waiting_groups = {}, {}, nil
  M.discard()
end)

local MAX_OFFERS = 4
-- In the order of LimitsRecord; what is used and charged has the first three of them in the same places.
local MEASURES = {'cores', 'milliGPU', 'memoryMiB', 'cards'}
local CARDS = layouts.LIMITS.CARDS

local ALLOWS_NOTHING = {{0, 0, 0, 0}, {}, false, '', {}, '', -1}

function M.rule_of(namespace)
  local known = rules[namespace]
  if known == nil then
    local found = call('HMGET', M.rules_key, namespace, '*')
    local stored = found[1] or found[2]
    -- A quota that cannot be read allows nothing until it is saved again.
    known = stored and (values.record(stored, Q) or ALLOWS_NOTHING)
    rules[namespace] = known
  end
  return known
end

-- A node's labels, and the models of its devices in lower case.
function M.kinds_on(name)
  local known = node_kinds[name]
  if not known then
    local stored = call('HMGET', server.prefix .. 'facts:' .. name, 'facts', 'devices')
    known = {labels = values.readable(stored[1], parse_json).labels or {}, models = {}}
    for _, device in ipairs(values.readable(stored[2], parse_json)) do
      known.models[device.uuid] = string.lower(device.model)
    end
    node_kinds[name] = known
  end
  return known
end

local function is_of_model(rule, model, name, uuid)
  local kinds = M.kinds_on(name)
  if rule[Q.MODEL_LABEL] ~= '' then return kinds.labels[rule[Q.MODEL_LABEL]] == model end
  return string.find(kinds.models[uuid] or '', string.lower(model), 1, true) ~= nil
end

-- Thousandths of a device's cores, and of a device: the larger of cores and memory. A share without
-- cores counts for as many as its memory.
local function parts_of(device, booking)
  local memory, cores = booking[B.MEMORY_MIB], booking[B.CORES_PERCENT]
  local size = device and device[D.MEMORY_MIB] or 0
  if booking[B.SHARING] == EXCLUSIVE or size == 0 then return 1000, 1000 end
  local part = math.min(1000, math.ceil(1000 * memory / size))
  local core = cores > 0 and 10 * cores or part
  return core, math.max(core, part)
end

local function bucket_in(used, bucket)
  used[bucket] = used[bucket] or {0, 0, 0, {}} -- a UsageRecord, or a ChargeRecord
  return used[bucket]
end

local function add_row(rows, bucket, core, milli, memory, uuid)
  local row = bucket_in(rows, bucket)
  row[1], row[2], row[3] = row[1] + core, row[2] + milli, row[3] + memory
  values.append(row[CHARGE.DEVICES], uuid)
end

-- The charge of a lease with this demand, by bucket; and whether a device is of a model that the quota
-- does not contain.
local function charges_for(rule, demand)
  local rows, has_other_model, name = {}, false, demand[DEMAND.NODE]
  for booking, device in capacity.each_device(demand) do
    local uuid, memory = booking[B.DEVICE], booking[B.MEMORY_MIB]
    local core, milli = parts_of(device, booking)
    add_row(rows, '', core, milli, memory, uuid)
    local is_named = false
    for _, model in ipairs(rule[Q.MODELS]) do
      if is_of_model(rule, model[1], name, uuid) then
        is_named = true
        add_row(rows, model[1], core, milli, memory, uuid)
      end
    end
    has_other_model = has_other_model or not is_named
  end
  return rows, has_other_model
end

-- What a namespace uses, {bucket -> UsageRecord}, or nil for a value that is none.
function M.used_in(value)
  local is_read, used = pcall(cmsgpack.unpack, value)
  if not is_read or type(used) ~= 'table' then return nil end
  for _, row in pairs(used) do
    if type(row) ~= 'table' or #row ~= U.COUNT or not values.has_types(row, U) then return nil end
  end
  return used
end

-- False if it cannot be read: then nothing more is allowed, and nothing is written, until it is counted again.
local function used_of(namespace)
  if used_by[namespace] == nil then
    local value = call('HGET', server.prefix .. 'quota-used', namespace)
    used_by[namespace] = not value and {} or M.used_in(value) or false
  end
  return used_by[namespace]
end

-- How many devices are used, and how many the request adds.
local function device_counts(used, requested)
  local count, more = 0, 0
  for _ in pairs(used[U.DEVICES]) do count = count + 1 end
  for _, uuid in ipairs(requested[CHARGE.DEVICES]) do
    if not used[U.DEVICES][uuid] then more = more + 1 end
  end
  return count, more
end

local function names_of(table_of)
  local names = {}
  for name in pairs(table_of) do names[#names + 1] = name end
  table.sort(names)
  return names
end

-- A model, and the others of which the rule allows nothing: a pod would be refused there, too.
local function names_with_forbidden(rule, model)
  local names = {model}
  for _, other in ipairs(rule[Q.MODELS]) do
    local name, limits = unpack(other)
    local is_forbidden = false
    for m = 1, #MEASURES do is_forbidden = is_forbidden or limits[m] == 0 end
    if is_forbidden and name ~= model then names[#names + 1] = name end
  end
  return names
end

-- Append to `found` what exceeds limits of a rule; `before` is the current use of a lease that is being resized.
local function add_excesses(found, rule, limits, bucket, used, requested, before)
  local has_model = bucket ~= ''
  for m, measure in ipairs(MEASURES) do
    local limit = limits[m]
    if limit >= 0 and not (before and (m == CARDS or requested[m] <= before[m])) then
      local now, more = used[m], requested[m]
      if m == CARDS then now, more = device_counts(used, requested) end
      if more > 0 and now + more > limit then
        local names = has_model and names_with_forbidden(rule, bucket) or m == CARDS and names_of(used[U.DEVICES])
        found[#found + 1] =
          {measure, bucket, limit, now, more, has_model and rule[Q.MODEL_LABEL] or '', names or {}, 0}
      end
    end
  end
end

-- Why the rule does not allow a namespace so much more, or nil; `before`: see `add_excesses`.
local function excesses_of(rule, namespace, rows, before)
  local used, found = used_of(namespace) or {}, {}
  add_excesses(found, rule, rule[Q.LIMITS], '', bucket_in(used, ''), rows[''], before[''])
  for _, model in ipairs(rule[Q.MODELS]) do
    local name, limits = unpack(model)
    if rows[name] then add_excesses(found, rule, limits, name, bucket_in(used, name), rows[name], before[name]) end
  end
  return found[1] and found
end

-- Why the quota does not allow this demand for this time (LIMITED_RUN_S of a request), as ExcessRecords, or
-- nil; and its charge.
function M.check(namespace, demand, run_s)
  local rule = M.rule_of(namespace)
  if not rule or #demand[DEMAND.BOOKINGS] == 0 then return nil end
  if not used_of(namespace) then rule = ALLOWS_NOTHING end
  local longest = rule[Q.MAX_RUN_S]
  if longest >= 0 and run_s > longest then
    return {{'runTime', '', longest, 0, run_s < math.huge and run_s or 0, '', {}, 0}}
  end
  local pools, name = rule[Q.POOLS], demand[DEMAND.NODE]
  if #pools > 0 then
    local pool, is_allowed = M.kinds_on(name).labels[rule[Q.POOL_LABEL]], false
    for _, allowed in ipairs(pools) do is_allowed = is_allowed or allowed == pool end
    if not is_allowed then return {{'pool', '', 0, 0, 0, rule[Q.POOL_LABEL], pools, 0}} end
  end
  local rows, has_other_model = charges_for(rule, demand)
  if has_other_model and rule[Q.ONLY_MODELS] then
    local models = {}
    for i, model in ipairs(rule[Q.MODELS]) do models[i] = model[1] end
    return {{'model', '', 0, 0, 0, rule[Q.MODEL_LABEL], models, 0}}
  end
  return excesses_of(rule, namespace, rows, {}), rows
end

local function add_charges(namespace, rows, sign)
  local used = used_of(namespace)
  if not used then return end
  for name, row in pairs(rows) do
    local bucket = bucket_in(used, name)
    for m = 1, 3 do bucket[m] = bucket[m] + sign * row[m] end
    for _, uuid in ipairs(row[CHARGE.DEVICES]) do
      local count = (bucket[U.DEVICES][uuid] or 0) + sign
      bucket[U.DEVICES][uuid] = count > 0 and count or nil
    end
  end
  changed[namespace] = true
end

function M.charge(pod, namespace, rows)
  charges[pod] = {namespace, rows}
  add_charges(namespace, rows, 1)
end

function M.charge_of(pod) return values.record(call('HGET', server.prefix .. 'quota-charges', pod), CHARGES) end

-- Replace the charge of a lease; or return why the quota does not allow it: then nothing may be written.
function M.recharge(pod, namespace, demand, is_smaller)
  local rule = M.rule_of(namespace)
  if not rule or #demand[DEMAND.BOOKINGS] == 0 then return nil end
  local charge = M.charge_of(pod) or {namespace, {}}
  add_charges(charge[CHARGES.NAMESPACE], charge[CHARGES.BY_MODEL], -1)
  local rows = charges_for(rule, demand)
  local excesses = excesses_of(rule, namespace, rows, charge[CHARGES.BY_MODEL])
  if excesses then return excesses end
  M.charge(pod, namespace, rows)
  if is_smaller then freed[namespace] = true end
end

-- Charge a stored lease, unless it is charged already or its namespace has no quota.
function M.charge_lease(pod, of_pod)
  local namespace = of_pod.request[REQUEST.NAMESPACE]
  local rule = M.rule_of(namespace)
  if rule and #of_pod.demand[DEMAND.BOOKINGS] > 0 and not charges[pod] then
    M.charge(pod, namespace, (charges_for(rule, of_pod.demand)))
  end
end

function M.release(pod)
  local charge = M.charge_of(pod)
  if charge then
    charges[pod] = false
    add_charges(charge[CHARGES.NAMESPACE], charge[CHARGES.BY_MODEL], -1)
    freed[charge[CHARGES.NAMESPACE]] = true
  end
end

-- Append to an excess which part of what is used was for other pods of a gang, now that this is discarded.
function M.add_gang_part(namespace, excess)
  for m, measure in ipairs(MEASURES) do
    if excess[E.MEASURE] == measure then
      local bucket = bucket_in(used_of(namespace) or {}, excess[E.MODEL])
      excess[E.BY_GANG] = excess[E.USED] - (m == CARDS and #names_of(bucket[U.DEVICES]) or bucket[m])
    end
  end
end

-- {namespace -> groups of its pods that wait for its quota}. Call this once no more pods are removed from them.
function M.waiting_groups()
  if not waiting_groups then
    waiting_groups = waiting.quota_groups(call('HKEYS', server.prefix .. 'waiting-groups'))
  end
  return waiting_groups
end

-- Offer what is left of the quota to pods that wait for it, at most `times` times; again whenever one of
-- them is placed.
function M.offer(namespace, times)
  if M.waiting_groups()[namespace] then call('HSET', server.prefix .. 'quota-offers', namespace, times) end
end

function M.write()
  for pod, charge in pairs(charges) do
    if charge then
      call('HSET', server.prefix .. 'quota-charges', pod, encode(charge))
    else
      call('HDEL', server.prefix .. 'quota-charges', pod)
    end
  end
  for namespace in pairs(changed) do
    call('HSET', server.prefix .. 'quota-used', namespace, encode(used_by[namespace]))
    if freed[namespace] then call('HSET', server.prefix .. 'quota-freed', namespace, ledger.capacity) end
    M.offer(namespace, MAX_OFFERS)
  end
end

-- Save how many quotas there are: all of them are known.
function M.save_count()
  local count = call('HLEN', M.rules_key)
  ledger.has_quotas = count > 0
  call('HSET', server.prefix .. 'ledger', 'quotas', count)
end

-- Charge all leases again.
function M.recount()
  M.save_count()
  call('DEL', server.prefix .. 'quota-charges', server.prefix .. 'quota-used')
  local cursor = ledger.has_quotas and '0'
  while cursor do
    local found = call('HSCAN', server.prefix .. 'leases', cursor, 'COUNT', 1000)
    for pod, value in values.each_pair(found[2]) do
      local of_pod = lease.read(value)
      if of_pod then M.charge_lease(pod, of_pod) end
    end
    cursor = found[1] ~= '0' and found[1]
  end
  M.write()
end

return M
