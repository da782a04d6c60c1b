-- Quotas: the most that live leases of a namespace may hold at once, on all devices and on those of
-- each model. Without any, nothing below is called. Counting needs no lease to be read again: what a
-- lease is charged is kept until it ends, whatever becomes of quotas' devices meanwhile.
--   quotas       hash  (beside the ledger's keys, left alone by a rebuild) namespace -> see R_*
--   meta         quotas: how many there are
--   charges      hash  pod -> {namespace, {bucket, {cores, milli-GPU, MiB, devices}, ...}}
--   held         hash  namespace -> {bucket -> {cores, milli-GPU, MiB, device -> leases on it}}
--   quota-freed  hash  namespace -> capacity number at which it last had more left of its quota
--   quota-due    hash  namespace -> times that its waiting pods are still to be offered that
-- A bucket is '' (all devices) or the name of a model. Pods that a quota keeps waiting are of the
-- group 'q:NAMESPACE', or 'q:NAMESPACE|GROUP' if what is freed where it allows them may help, too.
local quota = {
  on = tonumber(call('HGET', P .. 'ledger', 'quotas') or 0) > 0,
  rules_key = string.gsub(P, ':$', '') .. '-quotas',
  rules = {}, held = {}, kinds = {}, charges = {}, freed = {}, touched = {},
}
do -- A script may have 200 local names.
local MEASURES, ROUNDS_DUE = {'cores', 'milliGPU', 'memoryMiB', 'cards'}, 4
-- A quota: limits of everything (in the order of MEASURES, -1: none), models {name, limits}, whether
-- other models are refused, the node label that names models ('': the devices' own names), pools
-- allowed ({}: all), and the node label that names pools.
local R_LIMITS, R_MODELS, R_ONLY, R_MODEL_LABEL, R_POOLS, R_POOL_LABEL = 1, 2, 3, 4, 5, 6

function quota.rule_of(namespace)
  local known = quota.rules[namespace]
  if known == nil then
    local found = call('HMGET', quota.rules_key, namespace, '*')
    local value = found[1] or found[2]
    known = value and decode(value) or false
    quota.rules[namespace] = known
  end
  return known
end

-- A node's labels, and the models of its devices in small letters.
function quota.kinds_on(name)
  local known = quota.kinds[name]
  if not known then
    local told = call('HMGET', P .. 'facts:' .. name, 'facts', 'devices')
    known = {labels = told[1] and parse(told[1]).labels or {}, models = {}}
    for _, device in ipairs(told[2] and parse(told[2]) or {}) do
      known.models[device.uuid] = string.lower(device.model)
    end
    quota.kinds[name] = known
  end
  return known
end

local function is_of_model(rule, model, name, uuid)
  local kinds = quota.kinds_on(name)
  if rule[R_MODEL_LABEL] ~= '' then return kinds.labels[rule[R_MODEL_LABEL]] == model end
  return string.find(kinds.models[uuid] or '', string.lower(model), 1, true) ~= nil
end

-- Thousandths of a device's cores, and of a device: the larger of cores and memory.
-- Without cores, as much as the memory. The same as shared.model.quota.charge_of.
local function parts_of(uuid, memory, cores, company)
  local device = device_of(uuid)
  local size = device and device[D_MEMORY] or 0
  if company == ALONE or size == 0 then return 1000, 1000 end
  local part = math.min(1000, math.ceil(1000 * memory / size))
  local core = cores > 0 and 10 * cores or part
  return core, math.max(core, part)
end

local function add_row(rows, bucket, core, milli, memory, uuid)
  local row = rows[bucket]
  if not row then
    row = {0, 0, 0, {}}
    rows[bucket] = row
  end
  row[1], row[2], row[3] = row[1] + core, row[2] + milli, row[3] + memory
  row[4][#row[4] + 1] = uuid
end

-- What a lease that takes this is charged, by bucket; and whether a device is of no model named.
local function rows_of(rule, takes)
  local rows, is_other, name = {}, false, takes[1]
  for h = TAKES, takes[2], HOLD do
    local uuid, memory = takes[h], takes[h + 1]
    local core, milli = parts_of(uuid, memory, takes[h + 2], takes[h + 5])
    add_row(rows, '', core, milli, memory, uuid)
    local is_named = false
    for _, model in ipairs(rule[R_MODELS]) do
      if is_of_model(rule, model[1], name, uuid) then
        is_named = true
        add_row(rows, model[1], core, milli, memory, uuid)
      end
    end
    is_other = is_other or not is_named
  end
  return rows, is_other
end

local function held_of(namespace)
  if quota.held[namespace] == nil then
    local value = call('HGET', P .. 'held', namespace)
    quota.held[namespace] = value and decode(value) or {}
  end
  return quota.held[namespace]
end

local function bucket_in(held, bucket)
  held[bucket] = held[bucket] or {0, 0, 0, {}}
  return held[bucket]
end

local function cards_of(used, asked)
  local count, more = 0, 0
  for _ in pairs(used[4]) do count = count + 1 end
  for _, uuid in ipairs(asked[4]) do
    if not used[4][uuid] then more = more + 1 end
  end
  return count, more
end

local function names_of(table_of)
  local names = {}
  for name in pairs(table_of) do names[#names + 1] = name end
  table.sort(names)
  return names
end

-- `before` is what of it is held already, by a lease that is being resized.
local function excess_in(limits, bucket, used, asked, label, before)
  for m, measure in ipairs(MEASURES) do
    local limit = limits[m]
    if limit >= 0 and not (before and (m == 4 or asked[m] <= before[m])) then
      local now, more = used[m], asked[m]
      if m == 4 then now, more = cards_of(used, asked) end
      if more > 0 and now + more > limit then
        local values = bucket ~= '' and {bucket} or m == 4 and names_of(used[4]) or {}
        return {measure, bucket, limit, now, more, label, values}
      end
    end
  end
end

-- Why the namespace may not take this besides, as {measure, bucket, limit, held, asked, node label,
-- values}, or nil; and what it would be charged.
function quota.weigh(namespace, takes)
  local rule = quota.rule_of(namespace)
  if not rule or takes[2] < TAKES then return nil end
  local pools, name = rule[R_POOLS], takes[1]
  if #pools > 0 then
    local pool, is_allowed = quota.kinds_on(name).labels[rule[R_POOL_LABEL]], false
    for _, each in ipairs(pools) do is_allowed = is_allowed or each == pool end
    if not is_allowed then return {'pool', '', 0, 0, 0, rule[R_POOL_LABEL], pools} end
  end
  local rows, is_other = rows_of(rule, takes)
  if is_other and rule[R_ONLY] then
    local models = {}
    for i, model in ipairs(rule[R_MODELS]) do models[i] = model[1] end
    return {'model', '', 0, 0, 0, rule[R_MODEL_LABEL], models}
  end
  local held = held_of(namespace)
  local excess = excess_in(rule[R_LIMITS], '', bucket_in(held, ''), rows[''], '')
  for _, model in ipairs(excess and {} or rule[R_MODELS]) do
    local asked = rows[model[1]]
    excess = excess or asked and excess_in(model[2], model[1], bucket_in(held, model[1]), asked,
      rule[R_MODEL_LABEL])
  end
  return excess, rows
end

local function count_held(namespace, rows, sign)
  local held = held_of(namespace)
  for bucket, row in pairs(rows) do
    local used = bucket_in(held, bucket)
    for m = 1, 3 do used[m] = used[m] + sign * row[m] end
    for _, uuid in ipairs(row[4]) do
      local count = (used[4][uuid] or 0) + sign
      used[4][uuid] = count > 0 and count or nil
    end
  end
  quota.touched[namespace] = true
end

function quota.charge(pod, namespace, rows)
  quota.charges[pod] = {namespace, rows}
  count_held(namespace, rows, 1)
end

-- Charge a lease for what it takes from now on in place of what it took; or say why its namespace may
-- not take so much more, and then nothing may be written.
function quota.recharge(pod, namespace, takes, is_smaller)
  local rule = quota.rule_of(namespace)
  if not rule or takes[2] < TAKES then return nil end
  local stored = call('HGET', P .. 'charges', pod)
  local charge = stored and decode(stored) or {namespace, {}}
  count_held(charge[1], charge[2], -1)
  local rows, held, was = rows_of(rule, takes), held_of(namespace), charge[2]
  local excess = excess_in(rule[R_LIMITS], '', bucket_in(held, ''), rows[''], '', was[''])
  for _, model in ipairs(excess and {} or rule[R_MODELS]) do
    local name = model[1]
    excess = excess or rows[name] and excess_in(model[2], name, bucket_in(held, name), rows[name],
      rule[R_MODEL_LABEL], was[name])
  end
  if excess then return excess end
  quota.charge(pod, namespace, rows)
  if is_smaller then quota.freed[namespace] = true end
end

-- Charge a lease that is there, unless it is charged or its namespace has no quota.
function quota.charge_lease(pod, lease, value)
  local _, _, _, _, namespace = about(lease, value)
  local rule, takes = quota.rule_of(namespace), takes_of(lease, value)
  if rule and takes[2] >= TAKES and not quota.charges[pod] then
    quota.charge(pod, namespace, (rows_of(rule, takes)))
  end
end

function quota.release(pod)
  local value = call('HGET', P .. 'charges', pod)
  if value then
    local charge = decode(value)
    quota.charges[pod] = false
    count_held(charge[1], charge[2], -1)
    quota.freed[charge[1]] = true
  end
end

-- Forget what was counted but is not to be written.
function quota.forget()
  quota.held, quota.charges, quota.freed, quota.touched = {}, {}, {}, {}
end

-- To be offered to those who wait for it, `rounds` times at most; again whenever one of them takes.
function quota.offer(namespace, rounds)
  for _, group in ipairs(call('HKEYS', P .. 'groups')) do
    if string.match(group, '^q:([^|]*)') == namespace then
      call('HSET', P .. 'quota-due', namespace, rounds)
    end
  end
end

function quota.write()
  for pod, charge in pairs(quota.charges) do
    if charge then
      call('HSET', P .. 'charges', pod, pack(charge))
    else
      call('HDEL', P .. 'charges', pod)
    end
  end
  for namespace in pairs(quota.touched) do
    call('HSET', P .. 'held', namespace, pack(quota.held[namespace]))
    if quota.freed[namespace] then call('HSET', P .. 'quota-freed', namespace, capacity) end
    quota.offer(namespace, ROUNDS_DUE)
  end
end

-- Count all leases anew.
function quota.recount()
  local count = call('HLEN', quota.rules_key)
  quota.on = count > 0
  call('HSET', P .. 'ledger', 'quotas', count)
  call('DEL', P .. 'charges', P .. 'held')
  local cursor = '0'
  repeat
    local found = call('HSCAN', P .. 'leases', cursor, 'COUNT', quota.on and 1000 or 1)
    cursor = quota.on and found[1] or '0'
    for i = 1, quota.on and #found[2] or 0, 2 do
      quota.charge_lease(found[2][i], opened(found[2][i + 1]), found[2][i + 1])
    end
  until cursor == '0'
  quota.write()
end
end
