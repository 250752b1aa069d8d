/* The warm path of disttensor.dispatch in C: key, table, runners, wrappers.
 *
 * A call of a torch function on DistTensors is turned into words of 64 bits (its key), which are
 * looked up in a table. An entry of it holds the CallPlan (disttensor/dispatch/call_plan.py) that
 * Python has made, and most often does here what run.py does: read the locals, call the local
 * function on them, wrap the results. All else is done by Python:
 *
 *     a call that has no sure key      disttensor.dispatch.dispatch.dispatch
 *     the first call of a kind         dispatch.first_call, which also gives the plan
 *     a plan that is not native        run.carry_out
 *     an argument that the plan does
 *     not take for granted             run.carry_out, before anything has been run
 *
 * Methods and operators that calls are often made of come here without torch's parser of arguments
 * between, if a call of the same words is known (METHODS). A wrapper that dies is the next result
 * of its spec (keep_idle).
 *
 * Two calls with the same words have the same key in Python (dispatch/key.py). Words that are
 * addresses are those of objects that the entry keeps alive, so that no other object can have
 * them.
 *
 * Only the public C API of Python is used, and no header of torch: attributes of tensors are
 * read by their descriptors. All state is in the module, where the garbage collector sees it.
 * Whatever runs Python code may come back here, drop an entry, or change a list: an entry that runs
 * is held, and a list is measured anew after each step. The lock of the interpreter is relied on:
 * builds without it are refused, and so are sub-interpreters.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifdef Py_GIL_DISABLED
#error "disttensor has no C code for builds of Python without the global lock"
#endif
#if SIZEOF_VOID_P != 8
#error "disttensor's C code tells words apart by the lowest three bits of addresses"
#endif

#ifndef SOURCE
#define SOURCE "unknown" /* setup.py: the checksum of this file */
#endif

#define MOST_ENTRIES 16384 /* as many as dispatch.PLANS holds */
#define MOST_ARGUMENTS 24  /* of one call; more are carried out by Python */
#define MOST_WORDS 65536
#define MOST_NESTED 200 /* calls within calls; deeper ones are Python's, which counts its frames */
#define MOST_DEPTH 4  /* lists within lists, of the words of an argument */
#define SHORT 192 /* words that need no allocation */
#define MOST_IDLE 128 /* dead wrappers that are kept, of one spec and of all */
#define MOST_IDLE_OF_ALL 4096

/* What Python gives by configure(), by the same names. */
#define REFERENCES(X) \
    X(DistTensor) X(Tensor) X(Parameter) X(Size) /* classes */ \
    X(dtype_class) X(memory_format) X(layout) X(GradState) \
    X(local) X(spec) X(idle) X(meta_tensor) /* descriptors of DistTensor, and of DistSpec */ \
    X(shape) X(dtype) X(requires_grad) X(grad_fn) X(grad) X(is_leaf) X(version) /* of Tensor */ \
    X(dist_grad) /* DistTensor's, in Python */ \
    X(make_subclass) X(is_grad_enabled) X(autocast_is_on) X(untyped_storage) /* of torch */ \
    X(top_saved_tensors_hooks) \
    X(use_count) X(functions_are_seen) X(modes_see_functions) \
    X(dispatch) X(first_call) X(note) X(note_error) X(wrap_outputs) X(written) \
    X(share) X(remember) X(strict_depth) X(carry_out) X(derive) X(nothing) X(orphan) \
    X(CallPlan) X(Answer) X(Out) X(no_origin) /* of disttensor */ \
    X(UNCOUNTED) /* a list with one number */ \
    X(LIVE) X(INFERENCE) /* a dict and a list that are mostly empty */ \
    X(ProcessMesh) X(Replicate) X(Shard) X(Partial) /* classes */ \
    X(reshard) X(first_reshard) X(current_world) /* of disttensor */ \
    X(TAPE) X(REGION) X(CHANNEL) /* context variables */

/* Names of attributes. */
#define NAMES(X) \
    X(_grad_state) X(_view_state) X(_reduced) X(aliases) X(local_for) X(call) X(mesh) X(device) X(value) \
    X(local) X(reads) X(keywords) X(results) X(template) X(is_view) X(writes) X(untracked_writes) \
    X(may_reuse) X(reduce_first) X(transfers) X(native) X(dtype) X(meta_tensor) \
    X(collector) X(origin) X(former) X(grad) X(owner) X(last_uncounted) X(tags) X(dim) X(order) \
    X(reduce_op) X(_once) X(spec) X(layout) X(partial)

/* Methods of torch.Tensor that are methods of DistTensor, too, and the function that torch says was
 * called by them. */
#define METHODS(X) \
    X(view, view) X(reshape, reshape) X(transpose, transpose) X(permute, permute) X(t, t) \
    X(flatten, flatten) X(expand, expand) X(expand_as, expand_as) X(squeeze, squeeze) \
    X(unsqueeze, unsqueeze) X(select, select) X(narrow, narrow) X(chunk, chunk) \
    X(unbind, unbind) X(contiguous, contiguous) X(clone, clone) X(to, to) X(float, float) \
    X(type_as, type_as) X(add, add) X(sub, sub) X(mul, mul) X(div, div) X(matmul, matmul) \
    X(mm, mm) X(bmm, bmm) X(pow, pow) X(neg, neg) X(abs, abs) X(exp, exp) X(log, log) \
    X(sqrt, sqrt) X(rsqrt, rsqrt) X(square, square) X(sin, sin) X(cos, cos) X(tanh, tanh) \
    X(sigmoid, sigmoid) X(relu, relu) X(clamp, clamp) X(masked_fill, masked_fill) \
    X(sum, sum) X(mean, mean) X(var, var) X(max, max) X(argmax, argmax) X(cumsum, cumsum) \
    X(softmax, softmax) X(log_softmax, log_softmax) X(gather, gather) X(add_, add_) \
    X(sub_, sub_) X(mul_, mul_) X(div_, div_) X(addcmul_, addcmul_) X(addcdiv_, addcdiv_) \
    X(lerp_, lerp_) X(sqrt_, sqrt_) X(zero_, zero_) X(copy_, copy_) X(fill_, fill_) \
    X(__add__, add) X(__radd__, add) X(__sub__, sub) X(__mul__, mul) X(__rmul__, mul) \
    X(__truediv__, div) X(__matmul__, matmul) X(__neg__, neg) X(__iadd__, add_) \
    X(__isub__, sub_) X(__imul__, mul_)

enum {
#define NUMBER(name, asked) METHOD_##name,
    METHODS(NUMBER)
#undef NUMBER
    N_METHODS
};

typedef struct {
    PyObject *plain, *asked; /* torch.Tensor's own, and what torch says was called; NULL: none */
} Method;

typedef struct {
    PyObject *spec, *dtype; /* of one result; borrowed of the plan */
    PyObject *making; /* owned: what make_subclass takes */
    PyObject *idle; /* owned: the spec's list of wrappers that wait for another use */
} Output;

typedef enum { CONSTANT, LOCAL, VARYING, NESTED } How;

typedef struct {
    How how;
    PyObject *axes; /* borrowed of the plan */
} Use;

typedef struct {
    Py_ssize_t references; /* the table's, and one for each call that runs it */
    uint64_t hash;
    Py_ssize_t length;
    uint64_t *words;
    PyObject *kept;   /* a list: the objects whose addresses are among the words */
    PyObject *plan;   /* what Python has planned: carry_out runs it */
    int noted;        /* is there a rank to compare the program with? */
    enum { PYTHON, DIRECT, OFF_MESH, REDUCE, ANSWER } how; /* PYTHON: carry_out. All below is borrowed */
    PyObject *local_fn, *names, *kind, *answer; /* kind: of several results off the mesh, or None */
    PyObject *wholes; /* a tuple: what each tensor is reduced to first */
    PyObject *specs;  /* of the results, for wrap_outputs */
    PyObject *nothing, *orphan; /* owned */
    Py_ssize_t nargs, nuses, noutputs, ntargets, nsources;
    int views, pending, writes, uncounted, no_graph, passes, derives;
    Use *uses;
    Output *outputs;
    Py_ssize_t *targets, *sources, *shared; /* shared[i] < 0: no view */
} Entry;

typedef struct {
#define FIELD(name) PyObject *name;
    REFERENCES(FIELD)
    struct { NAMES(FIELD) } str;
#undef FIELD
    Method methods[N_METHODS];
    PyObject *carrier; /* dispatch, as the class has it while shortcuts are taken */
    int shortcuts; /* do methods look for known calls? Not while a tracer runs */
    Py_ssize_t idle_wrappers;
    Entry **table; /* open addressing; its size is a power of two */
    size_t mask, used;
    int nested; /* how many calls run, on all threads */
    long long hits, in_c, unsure, misses, past, reused; /* so far: for tests and for people */
} State;

/* Methods and destructors are given no module: that of the one that is configured. */
static State *configured;
static destructor destroy; /* DistTensor's own, which goes by tp_dealloc of the class */
static int destroying;     /* how many are on their way in it */
static int counted;        /* may C++ hold a tensor whose object dies? As torch was up to 2.9 */

typedef struct {
    uint64_t *at;
    Py_ssize_t length, room;
    uint64_t here[SHORT];
} Words;

typedef struct {
    PyObject *func, *args, *kwargs; /* a tuple; a dict or NULL: for Python, see as_python */
    PyObject *const *first; /* of args; a method's are not in a tuple */
    Py_ssize_t nargs, nnamed;
    PyObject *names[MOST_ARGUMENTS], *values[MOST_ARGUMENTS]; /* of kwargs, owned */
    int reshards; /* dt.reshard, and no function of torch's */
} Call;

static inline PyObject *
argument(const Call *call, Py_ssize_t i)
{
    return i < call->nargs ? call->first[i] : call->values[i - call->nargs];
}

/* Make what Python is called with. 0: an error. */
static int
as_python(Call *call)
{
    if (!call->args) {
        call->args = PyTuple_New(call->nargs);
        for (Py_ssize_t i = 0; call->args && i < call->nargs; i++) {
            PyTuple_SET_ITEM(call->args, i, Py_NewRef(call->first[i]));
        }
    }
    if (call->args && !call->kwargs && call->nnamed) {
        call->kwargs = PyDict_New();
        for (Py_ssize_t i = 0; call->kwargs && i < call->nnamed; i++) {
            if (PyDict_SetItem(call->kwargs, call->names[i], call->values[i]) < 0) {
                Py_CLEAR(call->kwargs);
            }
        }
        return call->kwargs != NULL;
    }
    return call->args != NULL;
}

/* Entries ------------------------------------------------------------------------------------- */

static void
release(Entry *entry)
{
    if (--entry->references) {
        return;
    }
    PyMem_Free(entry->words);
    PyMem_Free(entry->uses);
    for (Py_ssize_t i = 0; entry->outputs && i < entry->noutputs; i++) {
        Py_XDECREF(entry->outputs[i].idle);
        Py_XDECREF(entry->outputs[i].making);
    }
    PyMem_Free(entry->outputs);
    PyMem_Free(entry->targets);
    PyMem_Free(entry->sources);
    PyMem_Free(entry->shared);
    Py_XDECREF(entry->nothing);
    Py_XDECREF(entry->orphan);
    Py_XDECREF(entry->plan);
    Py_XDECREF(entry->kept);
    PyMem_Free(entry);
}

/* Forget all entries. What their release runs may come back: the table is empty by then. */
static void
clear_table(State *state)
{
    Entry **table = state->table;
    size_t size = table ? state->mask + 1 : 0;
    state->table = NULL;
    state->mask = state->used = 0;
    for (size_t i = 0; i < size; i++) {
        if (table[i]) {
            release(table[i]);
        }
    }
    PyMem_Free(table);
}

static Entry *
known(State *state, const Words *words, uint64_t hash)
{
    if (!state->table) {
        return NULL;
    }
    for (size_t i = hash & state->mask;; i = (i + 1) & state->mask) {
        Entry *entry = state->table[i];
        if (!entry) {
            return NULL;
        }
        if (entry->hash == hash && entry->length == words->length
            && !memcmp(entry->words, words->at, (size_t)words->length * sizeof(uint64_t))) {
            return entry;
        }
    }
}

static void
put(Entry **table, size_t mask, Entry *entry)
{
    size_t i = entry->hash & mask;
    while (table[i]) {
        i = (i + 1) & mask;
    }
    table[i] = entry;
}

/* Enter what is not known yet. 0: there is no memory for it, which is no error. */
static int
enter(State *state, Entry *entry)
{
    if (state->used >= MOST_ENTRIES) {
        clear_table(state); /* all at once: what is needed comes back from Python's table */
    }
    if (!state->table || state->used * 2 > state->mask) {
        size_t mask = state->table ? state->mask * 2 + 1 : 255;
        Entry **table = PyMem_Calloc(mask + 1, sizeof(Entry *));
        if (!table) {
            return 0;
        }
        for (size_t i = 0; state->table && i <= state->mask; i++) {
            if (state->table[i]) {
                put(table, mask, state->table[i]);
            }
        }
        PyMem_Free(state->table);
        state->table = table;
        state->mask = mask;
    }
    put(state->table, state->mask, entry);
    state->used++;
    return 1;
}

/* Numbers of a tuple, None as -1. NULL with *count 0 for None; -1 as the count of an error. */
static Py_ssize_t *
numbers_of(PyObject *tuple, Py_ssize_t *count)
{
    *count = 0;
    if (tuple == Py_None) {
        return NULL;
    }
    *count = -1;
    if (!PyTuple_CheckExact(tuple)) {
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    Py_ssize_t *numbers = PyMem_Calloc((size_t)(n ? n : 1), sizeof(Py_ssize_t));
    for (Py_ssize_t i = 0; numbers && i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        numbers[i] = item == Py_None ? -1 : PyLong_AsSsize_t(item);
        if (numbers[i] < 0 && item != Py_None) {
            PyMem_Free(numbers);
            return NULL;
        }
    }
    if (numbers) {
        *count = n;
    }
    return numbers;
}

static inline PyObject *get(PyObject *, PyObject *);
static inline int set(PyObject *, PyObject *, PyObject *);

/* The list of wrappers of a spec that wait for another use; NULL: an error. */
static PyObject *
idle_of(State *state, PyObject *spec)
{
    PyObject *idle = get(state->idle, spec);
    if (idle == Py_None) {
        Py_SETREF(idle, PyList_New(0));
        if (idle && set(state->idle, spec, idle) < 0) {
            Py_CLEAR(idle);
        }
    }
    if (idle && !PyList_CheckExact(idle)) {
        PyErr_SetString(PyExc_SystemError, "DistSpec.idle is a list, or None");
        Py_CLEAR(idle);
    }
    return idle;
}

/* A field of a plan, which keeps it. NULL: an error. */
static PyObject *
field(PyObject *plan, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(plan, name);
    Py_XDECREF(value);
    return value;
}

/* The same of a field of this class. */
static PyObject *
field_of(PyObject *plan, PyObject *name, PyTypeObject *type)
{
    PyObject *value = field(plan, name);
    if (value && Py_TYPE(value) != type) {
        PyErr_Format(PyExc_TypeError, "a field of a CallPlan has another class: %S", name);
        return NULL;
    }
    return value;
}

/* Is a field True? -1: an error. */
static int
says(PyObject *plan, PyObject *name)
{
    PyObject *value = field(plan, name);
    return value ? value == Py_True : -1;
}

/* Take in how the arguments are read (call_plan.Read). 0: in another way than is done here. */
static int
follow_reads(Entry *entry, PyObject *reads)
{
    for (Py_ssize_t i = 0; i < entry->nuses; i++) {
        PyObject *read = PyTuple_GET_ITEM(reads, i), *spec, *axes, *regular, *elements;
        Use *use = &entry->uses[i];
        int kind;
        if (!PyTuple_Check(read)
            || !PyArg_ParseTuple(read, "iOO!OO!", &kind, &spec, &PyTuple_Type, &axes, &regular,
                                 &PyTuple_Type, &elements)
            || spec != Py_None || regular != Py_None || kind < 0 || kind > 2) {
            return 0;
        }
        use->axes = axes;
        use->how = kind == 0 ? CONSTANT : kind == 2 ? NESTED : PyTuple_GET_SIZE(axes) ? VARYING : LOCAL;
        entry->no_graph = entry->no_graph || PyTuple_GET_SIZE(elements);
    }
    return 1;
}

/* Where the tensor of this number stands among the arguments; -1: nowhere. */
static Py_ssize_t
place_of(const Entry *entry, PyObject *number)
{
    Py_ssize_t wanted = PyLong_Check(number) ? PyLong_AsSsize_t(number) : -1;
    for (Py_ssize_t i = 0; wanted >= 0 && i < entry->nuses; i++) {
        if (entry->uses[i].how == LOCAL && wanted-- == 0) {
            return i;
        }
    }
    return -1;
}

/* Take in what is given off the mesh (infer.Out): on which arguments all of it depends, and of which
 * each result is a view. 0: it is not as expected. */
static int
follow_template(State *state, Entry *entry, PyObject *template)
{
    int several = Py_TYPE(template) != (PyTypeObject *)state->Out;
    entry->kind = several ? (PyObject *)Py_TYPE(template) : Py_None;
    if (several && !PyTuple_CheckExact(template) && !PyList_CheckExact(template)) {
        return 0;
    }
    Py_ssize_t n = several ? PySequence_Fast_GET_SIZE(template) : 1;
    entry->shared = PyMem_Calloc((size_t)n + 1, sizeof(Py_ssize_t));
    if (n < 1 || n != entry->noutputs || !entry->shared) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *out = several ? PySequence_Fast_GET_ITEM(template, i) : template;
        PyObject *number, *shape, *dtype, *sources, *same, *viewed;
        if (!PyTuple_Check(out)
            || !PyArg_ParseTuple(out, "OOOO!OO", &number, &shape, &dtype, &PyTuple_Type, &sources,
                                 &same, &viewed)) {
            return 0;
        }
        entry->shared[i] = viewed == Py_None ? -1 : place_of(entry, viewed);
        if (i == 0) {
            entry->nsources = PyTuple_GET_SIZE(sources);
            entry->sources = PyMem_Calloc((size_t)entry->nsources + 1, sizeof(Py_ssize_t));
        }
        for (Py_ssize_t k = 0; i == 0 && entry->sources && k < entry->nsources; k++) {
            entry->sources[k] = place_of(entry, PyTuple_GET_ITEM(sources, k));
            if (entry->sources[k] < 0) {
                return 0;
            }
        }
        if (!entry->sources || (viewed != Py_None && entry->shared[i] < 0)) {
            return 0;
        }
    }
    return 1;
}

/* Take a plan in. 0: Python carries it out. */
static int
follow(State *state, Entry *entry)
{
    PyObject *plan = entry->plan;
    if (Py_TYPE(plan) == (PyTypeObject *)state->Answer) {
        entry->answer = field(plan, state->str.value);
        entry->how = ANSWER;
        return entry->answer != NULL;
    }
    if (Py_TYPE(plan) != (PyTypeObject *)state->CallPlan) {
        return 0;
    }
    entry->local_fn = field(plan, state->str.local);
    entry->wholes = field_of(plan, state->str.reduce_first, &PyTuple_Type);
    if (!entry->local_fn || !entry->wholes) {
        return 0;
    }
    if (PyTuple_GET_SIZE(entry->wholes)) {
        entry->how = REDUCE;
        return entry->local_fn != Py_None;
    }
    PyObject *reads = field_of(plan, state->str.reads, &PyTuple_Type), *device;
    PyObject *writes = field(plan, state->str.writes), *origin = field(plan, state->str.origin);
    PyObject *reuse = field_of(plan, state->str.may_reuse, &PyTuple_Type);
    entry->names = field_of(plan, state->str.keywords, &PyTuple_Type);
    entry->specs = field_of(plan, state->str.results, &PyTuple_Type);
    if (!reads || !writes || !origin || !reuse || !entry->names || !entry->specs
        || says(plan, state->str.native) <= 0) {
        return 0;
    }
    entry->nuses = PyTuple_GET_SIZE(reads);
    entry->nargs = entry->nuses - PyTuple_GET_SIZE(entry->names);
    entry->noutputs = PyTuple_GET_SIZE(entry->specs);
    entry->pending = PyTuple_GET_SIZE(reuse) > 0;
    entry->derives = origin != state->no_origin;
    entry->views = says(plan, state->str.is_view);
    entry->uncounted = says(plan, state->str.untracked_writes);
    entry->passes = says(plan, state->str.transfers);
    entry->writes = writes != Py_None;
    entry->targets = numbers_of(writes, &entry->ntargets);
    entry->uses = PyMem_Calloc((size_t)entry->nuses + 1, sizeof(Use));
    entry->outputs = PyMem_Calloc((size_t)entry->noutputs + 1, sizeof(Output));
    if (entry->nuses > MOST_ARGUMENTS || entry->nargs < 0 || entry->ntargets < 0
        || (entry->writes && entry->nargs < 1) || !entry->uses || !entry->outputs
        || !follow_reads(entry, reads)) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entry->names); i++) {
        if (!PyUnicode_CheckExact(PyTuple_GET_ITEM(entry->names, i))) {
            return 0;
        }
    }
    for (Py_ssize_t i = 0; i < entry->ntargets; i++) {
        if (entry->targets[i] < (i ? entry->targets[i - 1] + 1 : 0)) {
            return 0; /* search_in goes once over the tensors */
        }
    }
    for (Py_ssize_t i = 0; i < entry->noutputs; i++) {
        Output *output = &entry->outputs[i];
        output->spec = PyTuple_GET_ITEM(entry->specs, i);
        output->dtype = field(output->spec, state->str.dtype);
        PyObject *meta_tensor = get(state->meta_tensor, output->spec);
        output->making = meta_tensor ? PyTuple_Pack(2, state->DistTensor, meta_tensor) : NULL;
        Py_XDECREF(meta_tensor);
        if (!output->dtype || !output->making || !(output->idle = idle_of(state, output->spec))) {
            return 0;
        }
    }
    if (entry->local_fn != Py_None) {
        entry->how = DIRECT;
        return 1;
    }
    PyObject *template = field(plan, state->str.template), *mesh = field(plan, state->str.mesh);
    if (!template || !mesh || !(device = PyObject_GetAttr(mesh, state->str.device))) {
        return 0;
    }
    entry->nothing = PyObject_CallOneArg(state->nothing, device);
    entry->orphan = entry->nothing ? PyObject_CallOneArg(state->orphan, device) : NULL;
    Py_DECREF(device);
    entry->how = OFF_MESH;
    return entry->orphan && follow_template(state, entry, template);
}

/* An entry for calls of these words, which are planned so. NULL, without an error: there is no
 * memory for it, or the plan is none of dispatch's. Steals nothing. */
static Entry *
new_entry(State *state, const Words *words, uint64_t hash, PyObject *kept, PyObject *plan)
{
    Entry *entry = PyMem_Calloc(1, sizeof(Entry));
    if (!entry) {
        return NULL;
    }
    entry->references = 1;
    entry->hash = hash;
    entry->length = words->length;
    entry->kept = Py_NewRef(kept);
    entry->plan = Py_NewRef(plan);
    entry->words = PyMem_Malloc((size_t)words->length * sizeof(uint64_t));
    PyObject *call = PyObject_GetAttr(plan, state->str.call);
    PyObject *mesh = call ? PyObject_GetAttr(call, state->str.mesh) : NULL;
    int good = entry->words && mesh;
    entry->noted = mesh && mesh != Py_None;
    Py_XDECREF(mesh);
    Py_XDECREF(call);
    if (!good) {
        PyErr_Clear();
        release(entry);
        return NULL;
    }
    memcpy(entry->words, words->at, (size_t)words->length * sizeof(uint64_t));
    if (!follow(state, entry)) {
        PyErr_Clear();
        entry->how = PYTHON;
    }
    return entry;
}

/* Attributes ---------------------------------------------------------------------------------- */

/* What a descriptor, as of a slot or of an attribute of Tensor, says of an object: as getattr, but
 * without looking for the descriptor. A descriptor checks the class of the object itself. */
static inline PyObject *
get(PyObject *descriptor, PyObject *object)
{
    return Py_TYPE(descriptor)->tp_descr_get(descriptor, object, (PyObject *)Py_TYPE(object));
}

static inline int
set(PyObject *descriptor, PyObject *object, PyObject *value)
{
    return Py_TYPE(descriptor)->tp_descr_set(descriptor, object, value);
}

/* Is this attribute of a DistTensor None? -1: an error. */
static int
is_none(PyObject *x, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(x, name);
    if (!value) {
        return -1;
    }
    int none = value == Py_None;
    Py_DECREF(value);
    return none;
}

/* What is kept beside a DistTensor by this name: borrowed of its __dict__. NULL: None, as the class
 * has it, or an error. An empty __dict__ is seen at once, and most are. */
static inline PyObject *
beside(PyObject *dict, PyObject *name)
{
    PyObject *value = PyDict_GET_SIZE(dict) ? PyDict_GetItemWithError(dict, name) : NULL;
    return value == Py_None ? NULL : value;
}

/* What C++ asks of a DistTensor by a name in C. Torch asks each argument of a call who carries it out,
 * up to three times, and the general way makes a str of the name and looks through all base classes:
 * for a list of tensors that is as much as all the rest. Python itself never comes here. */
static PyObject *
asked(PyObject *self, char *name)
{
    State *state = configured;
    if (state && state->shortcuts && Py_TYPE(self) == (PyTypeObject *)state->DistTensor
        && !strcmp(name, "__torch_function__")) {
        return Py_NewRef(state->carrier);
    }
    PyObject *text = PyUnicode_FromString(name);
    PyObject *value = text ? PyObject_GetAttr(self, text) : NULL;
    Py_XDECREF(text);
    return value;
}

/* Is nothing kept beside a DistTensor by this name? -1: an error. */
static int
nothing_beside(PyObject *x, PyObject *name)
{
    PyObject *dict = PyObject_GenericGetDict(x, NULL);
    if (!dict) {
        return -1;
    }
    int nothing = !beside(dict, name);
    Py_DECREF(dict);
    return PyErr_Occurred() ? -1 : nothing;
}

/* Does a function, or the descriptor of an object, give True? -1: an error. */
static int
is_true(PyObject *value)
{
    if (!value) {
        return -1;
    }
    int yes = value == Py_True;
    Py_DECREF(value);
    return yes;
}

/* The key --------------------------------------------------------------------------------------
 *
 * The lowest three bits of a word say what it is. Addresses of objects end in 000.
 */
enum { SPEC, OBJECT, INTEGER, MARK, SEQUENCE, KEYWORD = 6, STRING = 7 };
enum { FLOAT, SLICE, PLAIN };  /* of a MARK */
enum { TUPLE, LIST, SIZE };    /* of a SEQUENCE */

static int
push(Words *words, uint64_t word)
{
    if (words->length == words->room) {
        if (words->room >= MOST_WORDS) {
            return 0;
        }
        Py_ssize_t room = words->room * 4;
        uint64_t *at = PyMem_Malloc((size_t)room * sizeof(uint64_t));
        if (!at) {
            return 0;
        }
        memcpy(at, words->at, (size_t)words->length * sizeof(uint64_t));
        if (words->at != words->here) {
            PyMem_Free(words->at);
        }
        words->at = at;
        words->room = room;
    }
    words->at[words->length++] = word;
    return 1;
}

/* The address of an object, which is put into kept where that is a list. */
static int
push_object(Words *words, PyObject *object, int tag, PyObject *kept)
{
    if (kept && PyList_Append(kept, object) < 0) {
        return 0;
    }
    return push(words, (uint64_t)(uintptr_t)object | (uint64_t)tag);
}

static int add_argument(State *, Words *, PyObject *, PyObject *, int);

/* Shape and dtype of a plain tensor. */
static int
add_plain(State *state, Words *words, PyObject *tensor, PyObject *kept)
{
    PyObject *shape = get(state->shape, tensor), *dtype = NULL;
    int sure = shape && PyTuple_Check(shape)
               && push(words, PLAIN << 3 | MARK)
               && push(words, (uint64_t)PyTuple_GET_SIZE(shape));
    for (Py_ssize_t i = 0; sure && i < PyTuple_GET_SIZE(shape); i++) {
        PyObject *size = PyTuple_GET_ITEM(shape, i);
        sure = PyLong_CheckExact(size) && add_argument(state, words, size, kept, 0);
    }
    if (sure) {
        dtype = get(state->dtype, tensor);
        sure = dtype && push_object(words, dtype, OBJECT, kept);
    }
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return sure;
}

/* What a mesh axis does to a tensor: the class, and its fields. Classes of others are not sure. */
static int
add_placement(State *state, Words *words, PyObject *value, PyObject *kept)
{
    PyObject *type = (PyObject *)Py_TYPE(value);
    PyObject *names[] = {type == state->Partial ? state->str.reduce_op : state->str.dim,
                         state->str.order};
    int n = type == state->Replicate ? 0 : type == state->Partial ? 1 : 2;
    int sure = push_object(words, type, OBJECT, kept);
    for (int i = 0; sure && i < n; i++) {
        PyObject *field = PyObject_GetAttr(value, names[i]);
        sure = field && add_argument(state, words, field, kept, MOST_DEPTH);
        Py_XDECREF(field);
    }
    return sure;
}

/* The words of an argument, as key_of says. 0: it has none that are sure; an error may be set. */
static int
add_argument(State *state, Words *words, PyObject *value, PyObject *kept, int depth)
{
    PyTypeObject *type = Py_TYPE(value);
    if (type == (PyTypeObject *)state->DistTensor) {
        PyObject *spec = get(state->spec, value);
        if (!spec) {
            return 0;
        }
        int sure = push_object(words, spec, SPEC, kept);
        Py_DECREF(spec); /* the tensor has it */
        return sure;
    }
    if (type == &PyLong_Type) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow || number >= 1LL << 59 || number < -(1LL << 59)) {
            return 0;
        }
        return push(words, (uint64_t)number << 3 | INTEGER);
    }
    if (value == Py_None || type == &PyBool_Type || value == Py_Ellipsis
        || type == (PyTypeObject *)state->dtype_class
        || type == (PyTypeObject *)state->memory_format
        || type == (PyTypeObject *)state->layout) {
        return push_object(words, value, OBJECT, kept);
    }
    if (type == &PyFloat_Type) {
        return push(words, FLOAT << 3 | MARK);
    }
    if (type == &PyUnicode_Type) {
        return PyUnicode_CHECK_INTERNED(value) && push_object(words, value, STRING, kept);
    }
    if (depth >= MOST_DEPTH) {
        return 0;
    }
    if (type == (PyTypeObject *)state->ProcessMesh) {
        return push_object(words, value, OBJECT, kept);
    }
    if (type == (PyTypeObject *)state->Replicate || type == (PyTypeObject *)state->Shard
        || type == (PyTypeObject *)state->Partial) {
        return add_placement(state, words, value, kept);
    }
    if (type == &PyTuple_Type || type == &PyList_Type || type == (PyTypeObject *)state->Size) {
        int list = type == &PyList_Type;
        uint64_t kind = list ? LIST : type == &PyTuple_Type ? TUPLE : SIZE;
        Py_ssize_t length = list ? PyList_GET_SIZE(value) : PyTuple_GET_SIZE(value);
        if (!push(words, (uint64_t)length << 5 | kind << 3 | SEQUENCE)) {
            return 0;
        }
        for (Py_ssize_t i = 0; i < length; i++) {
            if (list && i >= PyList_GET_SIZE(value)) {
                return 0; /* it was changed meanwhile */
            }
            PyObject *item = list ? PyList_GET_ITEM(value, i) : PyTuple_GET_ITEM(value, i);
            Py_INCREF(item);
            int sure = add_argument(state, words, item, kept, depth + 1);
            Py_DECREF(item);
            if (!sure) {
                return 0;
            }
        }
        return !list || PyList_GET_SIZE(value) == length;
    }
    if (type == &PySlice_Type) {
        PySliceObject *slice = (PySliceObject *)value;
        return push(words, SLICE << 3 | MARK)
               && add_argument(state, words, slice->start, kept, depth + 1)
               && add_argument(state, words, slice->stop, kept, depth + 1)
               && add_argument(state, words, slice->step, kept, depth + 1);
    }
    if (type == (PyTypeObject *)state->Tensor || type == (PyTypeObject *)state->Parameter) {
        return add_plain(state, words, value, kept);
    }
    return 0;
}

/* Is it a function that stays? Others would fill the table: bound methods and their like are made
 * for each call. */
static int
lasts(PyObject *func)
{
    PyTypeObject *type = Py_TYPE(func);
    if (type == &PyCFunction_Type) {
        PyObject *self = PyCFunction_GET_SELF(func);
        return !self || self == Py_None || PyModule_Check(self) || PyType_Check(self);
    }
    return type == &PyMethodDescr_Type || type == &PyWrapperDescr_Type || type == &PyFunction_Type;
}

/* The words of a call. 0: it has none that are sure; an error may be set. */
static int
add_call(State *state, Words *words, const Call *call, PyObject *kept)
{
    if (!lasts(call->func) || !push_object(words, call->func, OBJECT, kept)) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < call->nargs + call->nnamed; i++) {
        if (i >= call->nargs) {
            PyObject *name = call->names[i - call->nargs];
            if (!PyUnicode_CheckExact(name) || !PyUnicode_CHECK_INTERNED(name)
                || !push_object(words, name, KEYWORD, kept)) {
                return 0;
            }
        }
        if (!add_argument(state, words, argument(call, i), kept, 0)) {
            return 0;
        }
    }
    return 1;
}

static uint64_t
hash_of(const Words *words)
{
    uint64_t hash = 0x9E3779B97F4A7C15u * (uint64_t)words->length;
    for (Py_ssize_t i = 0; i < words->length; i++) {
        hash = (hash ^ words->at[i]) * 0xff51afd7ed558ccdu;
        hash ^= hash >> 29;
    }
    return hash;
}

/* Results ------------------------------------------------------------------------------------- */

/* Let go of all wrappers that wait: there are many, of specs that come no more. */
static void
drop_idle(State *state)
{
    for (size_t i = 0; state->table && i <= state->mask; i++) {
        Entry *entry = state->table[i];
        for (Py_ssize_t k = 0; entry && entry->how != PYTHON && k < entry->noutputs; k++) {
            PyObject *idle = entry->outputs[k].idle;
            if (PyList_SetSlice(idle, 0, PyList_GET_SIZE(idle), NULL) < 0) {
                PyErr_Clear();
            }
        }
    }
    state->idle_wrappers = 0;
}

/* Keep a wrapper that dies for the next result of its spec, as it was when it was made: without a
 * local, a spec and a __dict__, and unseen by weak references and the garbage collector. 0: it
 * cannot be kept, and nothing has been done to it. Making one and letting it die costs as much as
 * all the rest here, so these lists are what free lists are to Python's own classes. */
static int
keep_idle(State *state, PyObject *self)
{
    Py_SET_REFCNT(self, 1); /* nothing that is called here lets it die again, or keeps it */
    PyObject *spec = get(state->spec, self), *idle = NULL, *users = NULL, *dict = NULL;
    if (!spec) {
        state->idle_wrappers -= state->idle_wrappers > 0; /* one that was kept */
        goto end;
    }
    idle = get(state->idle, spec);
    if (!idle || !PyList_CheckExact(idle) || PyList_GET_SIZE(idle) >= MOST_IDLE) {
        goto end;
    }
    if (counted) {
        users = PyObject_CallOneArg(state->use_count, self);
        if (!users || !PyLong_CheckExact(users) || PyLong_AsLong(users) != 1) {
            goto end;
        }
    }
    dict = PyObject_GenericGetDict(self, NULL);
end:
    Py_XDECREF(users);
    if (!dict || Py_REFCNT(dict) != 2 || beside(dict, state->str._once)) { /* somebody else's */
        PyErr_Clear();
        Py_XDECREF(dict);
        Py_XDECREF(idle);
        Py_XDECREF(spec);
        Py_SET_REFCNT(self, 0);
        return 0;
    }
    Py_SET_REFCNT(self, 0);
    PyObject_GC_UnTrack(self);
    PyObject_ClearWeakRefs(self);
    Py_SET_REFCNT(self, 1);
    PyDict_Clear(dict);
    Py_DECREF(dict);
    if (set(state->local, self, NULL) == 0 && set(state->spec, self, NULL) == 0
        && PyList_Append(idle, self) == 0) {
        state->idle_wrappers++;
    }
    PyErr_Clear();
    Py_DECREF(self); /* the list has it; if not, it dies now */
    Py_DECREF(idle);
    Py_DECREF(spec);
    if (state->idle_wrappers > MOST_IDLE_OF_ALL) {
        drop_idle(state);
    }
    return 1;
}

/* The destructor of DistTensor. That of classes which are written in Python looks for the first
 * base whose destructor is another one, so it must find itself in the class while it runs. */
static void
end_of_life(PyObject *self)
{
    State *state = configured;
    PyTypeObject *type = state ? (PyTypeObject *)state->DistTensor : NULL;
    if (type && Py_TYPE(self) == type && !PyErr_Occurred() && keep_idle(state, self)) {
        return;
    }
    if (type) {
        type->tp_dealloc = destroy;
    }
    destroying++;
    destroy(self);
    destroying--;
    if (configured && !destroying) { /* what ran meanwhile may have ended the module */
        ((PyTypeObject *)configured->DistTensor)->tp_dealloc = end_of_life;
    }
}

/* A DistTensor of what this rank computed. ``making``: what make_subclass takes. Steals local. */
static PyObject *
wrap_as(State *state, PyObject *idle, PyObject *making, PyObject *local, PyObject *spec)
{
    Py_ssize_t n = PyList_CheckExact(idle) ? PyList_GET_SIZE(idle) : 0;
    PyObject *new;
    if (n) {
        new = Py_NewRef(PyList_GET_ITEM(idle, n - 1));
        state->idle_wrappers -= state->idle_wrappers > 0;
        state->reused++;
        if (PyList_SetSlice(idle, n - 1, n, NULL) < 0) {
            Py_CLEAR(new);
        }
    }
    else if (making) {
        new = PyObject_Call(state->make_subclass, making, NULL);
    }
    else {
        PyObject *meta_tensor = get(state->meta_tensor, spec);
        new = meta_tensor ? PyObject_CallFunctionObjArgs(state->make_subclass, state->DistTensor,
                                                         meta_tensor, NULL)
                          : NULL;
        Py_XDECREF(meta_tensor);
    }
    if (new && (set(state->local, new, local) < 0 || set(state->spec, new, spec) < 0)) {
        Py_CLEAR(new);
    }
    if (new && n) {
        PyObject_GC_Track(new);
    }
    Py_DECREF(local);
    return new;
}

static PyObject *
wrap(State *state, const Output *output, PyObject *local)
{
    return wrap_as(state, output->idle, output->making, local, output->spec);
}

/* Is it a plain tensor of the dtype that was expected? -1: an error. */
static int
as_expected(State *state, const Output *output, PyObject *local)
{
    if (Py_TYPE(local) != (PyTypeObject *)state->Tensor) {
        return 0;
    }
    PyObject *dtype = get(state->dtype, local);
    if (!dtype) {
        return -1;
    }
    int same = dtype == output->dtype;
    Py_DECREF(dtype);
    return same;
}

/* Local results as DistTensors, in the structure they came in. Steals out. Python wraps what is not
 * as expected: another dtype, as under autocast; a named tuple. */
static PyObject *
wrap_outputs(State *state, Entry *entry, PyObject *out)
{
    int list = PyList_CheckExact(out), expected;
    if (!list && !PyTuple_CheckExact(out)) {
        expected = entry->noutputs ? as_expected(state, entry->outputs, out) : 0;
        if (expected > 0) {
            return wrap(state, entry->outputs, out);
        }
    }
    else if ((list ? PyList_GET_SIZE(out) : PyTuple_GET_SIZE(out)) == entry->noutputs) {
        PyObject *locals = list ? PyList_AsTuple(out) : Py_NewRef(out);
        PyObject *results = locals ? PyTuple_New(entry->noutputs) : NULL;
        expected = results ? 1 : -1;
        for (Py_ssize_t i = 0; expected > 0 && i < entry->noutputs; i++) {
            PyObject *local = PyTuple_GET_ITEM(locals, i);
            expected = as_expected(state, &entry->outputs[i], local);
            if (expected > 0) {
                PyObject *new = wrap(state, &entry->outputs[i], Py_NewRef(local));
                expected = new ? 1 : -1;
                PyTuple_SET_ITEM(results, i, new);
            }
        }
        Py_XDECREF(locals);
        if (expected > 0) {
            Py_DECREF(out);
            if (list) {
                Py_SETREF(results, PySequence_List(results));
            }
            return results;
        }
        Py_XDECREF(results);
    }
    else {
        expected = 0;
    }
    PyObject *result = NULL;
    if (expected == 0) {
        result = PyObject_CallFunctionObjArgs(state->wrap_outputs, out, entry->specs, NULL);
    }
    Py_DECREF(out);
    return result;
}

/* Runners ------------------------------------------------------------------------------------- */

static PyObject *
call_runner(State *state, Entry *entry, Call *call)
{
    if (!as_python(call)) {
        return NULL;
    }
    PyObject *args[] = {entry->plan, call->args, call->kwargs ? call->kwargs : Py_None};
    return PyObject_Vectorcall(state->carry_out, args, 3, NULL);
}

/* Does what is made of a local, or the local itself that comes out, belong to a graph now? -1: an
 * error. */
static int
in_graph(State *state, PyObject *local)
{
    int needs = is_true(get(state->requires_grad, local));
    return needs > 0 ? is_true(PyObject_CallNoArgs(state->is_grad_enabled)) : needs;
}

/* Is an alias, (alias, made at, region), of the value that the local has now, and of this region of
 * activation checkpointing? Those of leaves always are. -1: an error; 0: no, or not known here. */
static int
lasting(State *state, PyObject *x, PyObject *alias)
{
    PyObject *made_at = PyTuple_GET_ITEM(alias, 1);
    int overflow;
    long long then = PyLong_AsLongLongAndOverflow(made_at, &overflow);
    if (then < 0 || overflow) {
        return PyErr_Occurred() ? -1 : !overflow;
    }
    if (PyTuple_GET_ITEM(alias, 2) != Py_None) {
        return 0;
    }
    PyObject *hooks = PyObject_CallOneArg(state->top_saved_tensors_hooks, Py_True);
    PyObject *local = hooks ? get(state->local, x) : NULL;
    PyObject *version = local ? get(state->version, local) : NULL;
    PyObject *uncounted = version ? PySequence_GetItem(state->UNCOUNTED, 0) : NULL;
    int same = uncounted ? hooks == Py_None : -1;
    if (same > 0) {
        long long now = PyLong_AsLongLong(version), others = PyLong_AsLongLong(uncounted);
        same = PyErr_Occurred() ? -1 : now + others == then;
    }
    Py_XDECREF(uncounted);
    Py_XDECREF(version);
    Py_XDECREF(local);
    Py_XDECREF(hooks);
    return same;
}

/* The local for a use that varies over axes: an alias, which is mostly there, or the local itself
 * where no gradient comes back. */
static PyObject *
local_for(State *state, PyObject *x, PyObject *axes)
{
    PyObject *grad_state = PyObject_GetAttr(x, state->str._grad_state), *found = NULL;
    if (!grad_state) {
        return NULL;
    }
    int none = grad_state == Py_None;
    if (Py_TYPE(grad_state) == (PyTypeObject *)state->GradState) {
        PyObject *aliases = PyObject_GetAttr(grad_state, state->str.aliases);
        PyObject *hit = NULL;
        none = aliases == Py_None;
        if (aliases && PyDict_CheckExact(aliases)) {
            hit = PyDict_GetItemWithError(aliases, axes);
        }
        if (hit && PyTuple_CheckExact(hit) && PyTuple_GET_SIZE(hit) == 3) {
            Py_INCREF(hit);
            if (lasting(state, x, hit) > 0) {
                found = Py_NewRef(PyTuple_GET_ITEM(hit, 0));
            }
            Py_DECREF(hit);
        }
        Py_XDECREF(aliases);
    }
    Py_DECREF(grad_state);
    if (none && !PyErr_Occurred()) {
        PyObject *local = get(state->local, x);
        int graph = local ? in_graph(state, local) : -1;
        if (!graph) {
            return local;
        }
        Py_XDECREF(local);
    }
    if (found || PyErr_Occurred()) {
        return found;
    }
    return PyObject_CallMethodOneArg(x, state->str.local_for, axes);
}

/* A list or tuple with the locals of the DistTensors in it. */
static PyObject *
locals_of(State *state, PyObject *value)
{
    if (Py_TYPE(value) == (PyTypeObject *)state->DistTensor) {
        return get(state->local, value);
    }
    int list = PyList_CheckExact(value);
    if (!list && !PyTuple_CheckExact(value)) {
        return Py_NewRef(value);
    }
    if (Py_EnterRecursiveCall(" in a list of tensors")) {
        return NULL; /* it was put into itself meanwhile */
    }
    PyObject *copy = list ? PyList_AsTuple(value) : Py_NewRef(value);
    if (!copy) {
        Py_LeaveRecursiveCall();
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(copy);
    PyObject *locals = list ? PyList_New(n) : PyTuple_New(n);
    for (Py_ssize_t i = 0; locals && i < n; i++) {
        PyObject *local = locals_of(state, PyTuple_GET_ITEM(copy, i));
        if (!local) {
            Py_CLEAR(locals);
        }
        else if (list) {
            PyList_SET_ITEM(locals, i, local);
        }
        else {
            PyTuple_SET_ITEM(locals, i, local);
        }
    }
    Py_DECREF(copy);
    Py_LeaveRecursiveCall();
    return locals;
}

typedef struct {
    Entry *entry;
    Py_ssize_t seen, next; /* how many tensors there were so far; the target that is looked for */
    PyObject *found, *plain;
} Search;

/* Append those of the tensors in a value that are targets. */
static int
search_in(State *state, Search *search, PyObject *value)
{
    if (search->next == search->entry->ntargets) {
        return 0;
    }
    PyTypeObject *type = Py_TYPE(value);
    int dist = type == (PyTypeObject *)state->DistTensor;
    if (dist || type == (PyTypeObject *)state->Tensor
        || type == (PyTypeObject *)state->Parameter) {
        if (search->entry->targets[search->next] != search->seen++) {
            return 0;
        }
        search->next++;
        PyObject *list = dist ? search->found : search->plain;
        return list ? PyList_Append(list, value) : 0;
    }
    int list = PyList_CheckExact(value), failed = 0;
    if (!list && !PyTuple_CheckExact(value)) {
        return 0;
    }
    if (Py_EnterRecursiveCall(" in a list of tensors")) {
        return -1; /* it was put into itself meanwhile */
    }
    for (Py_ssize_t i = 0; !failed && i < (list ? PyList_GET_SIZE(value) : PyTuple_GET_SIZE(value));
         i++) {
        PyObject *item = list ? PyList_GET_ITEM(value, i) : PyTuple_GET_ITEM(value, i);
        Py_INCREF(item);
        failed = search_in(state, search, item);
        Py_DECREF(item);
    }
    Py_LeaveRecursiveCall();
    return failed;
}

/* What an in-place call writes to, less plain tensors that take DistTensors in: a list. Those come
 * into plain, where that is a list. */
static PyObject *
targets(State *state, Entry *entry, const Call *call, PyObject *plain)
{
    Search search = {entry, 0, 0, PyList_New(0), plain};
    int failed = !search.found;
    for (Py_ssize_t i = 0; !failed && i < call->nargs + call->nnamed; i++) {
        failed = search_in(state, &search, argument(call, i));
    }
    if (!failed && search.next < entry->ntargets) {
        PyErr_SetString(PyExc_SystemError, "a plan writes to a tensor that is not there");
        failed = 1;
    }
    if (failed) {
        Py_CLEAR(search.found);
    }
    return search.found;
}

/* Is there no use of x but its local and, of a leaf, what stays with it? -1: an error. */
static int
no_uses(State *state, PyObject *x, PyObject *grad_state)
{
    int none = 0;
    Py_INCREF(grad_state);
    if (Py_TYPE(grad_state) == (PyTypeObject *)state->GradState) {
        none = is_none(grad_state, state->str.origin);
        if (none > 0) {
            none = is_none(grad_state, state->str.aliases);
            if (!none) {
                PyObject *local = get(state->local, x);
                none = local ? is_true(get(state->is_leaf, local)) : -1;
                Py_XDECREF(local);
            }
        }
    }
    Py_DECREF(grad_state);
    return none;
}

/* The local of x has been written to: its uses before this are of the old value. It is no view of a
 * copy: see fits. */
static int
written(State *state, PyObject *x)
{
    PyObject *dict = PyObject_GenericGetDict(x, NULL);
    if (!dict) {
        return -1;
    }
    int plain = PyDict_GET_SIZE(state->LIVE) == 0 && PyList_GET_SIZE(state->INFERENCE) == 0
                && !beside(dict, state->str._reduced);
    if (plain) {
        PyObject *grad_state = beside(dict, state->str._grad_state);
        plain = grad_state ? no_uses(state, x, grad_state) : 1;
    }
    Py_DECREF(dict);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (plain) {
        return 0;
    }
    PyObject *done = PyObject_CallOneArg(state->written, x);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The memory of a local was written to, and autograd has not counted it: the last of so many. */
static int
count(State *state, PyObject *local, PyObject *number)
{
    PyObject *storage = PyObject_CallOneArg(state->untyped_storage, local);
    int failed = !storage || PyObject_SetAttr(storage, state->str.last_uncounted, number) < 0;
    Py_XDECREF(storage);
    return failed ? -1 : 0;
}

/* Count what a call wrote to aims (or to the only one, where that is NULL), and to plain tensors:
 * as count of disttensor.tensor.versions. */
static int
count_all(State *state, PyObject *aims, PyObject *only, PyObject *plain)
{
    Py_ssize_t n = aims ? PyList_GET_SIZE(aims) : 1, others = plain ? PyList_GET_SIZE(plain) : 0;
    PyObject *before = PySequence_GetItem(state->UNCOUNTED, 0);
    long long total = before ? PyLong_AsLongLong(before) : -1;
    PyObject *number = total < 0 ? NULL : PyLong_FromLongLong(total + n + others);
    int failed = !number || PySequence_SetItem(state->UNCOUNTED, 0, number) < 0;
    for (Py_ssize_t i = 0; !failed && i < n; i++) {
        PyObject *local = get(state->local, aims ? PyList_GET_ITEM(aims, i) : only);
        failed = !local || count(state, local, number) < 0;
        Py_XDECREF(local);
    }
    for (Py_ssize_t i = 0; !failed && i < others; i++) {
        failed = count(state, PyList_GET_ITEM(plain, i), number) < 0;
    }
    Py_XDECREF(number);
    Py_XDECREF(before);
    return failed ? -1 : 0;
}

/* The result of a call that wrote to its targets. Steals out. */
static PyObject *
written_all(State *state, Entry *entry, const Call *call, PyObject *aims, PyObject *plain,
            PyObject *out)
{
    int failed = entry->uncounted ? count_all(state, aims, argument(call, 0), plain) : 0;
    if (aims) {
        for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(aims); i++) {
            failed = written(state, PyList_GET_ITEM(aims, i));
        }
    }
    else if (!failed) {
        failed = written(state, argument(call, 0));
    }
    int nothing = out == Py_None;
    Py_DECREF(out);
    return failed ? NULL : nothing ? Py_NewRef(Py_None) : Py_NewRef(argument(call, 0));
}

/* Are the arguments as a plan takes for granted? 0: Python carries the call out. -1: an error. */
static int
fits(State *state, Entry *entry, const Call *call, PyObject *aims)
{
    if (entry->nargs != call->nargs || entry->nuses != call->nargs + call->nnamed) {
        return 0;
    }
    if (entry->no_graph) {
        int graph = is_true(PyObject_CallNoArgs(state->is_grad_enabled));
        if (graph) {
            return graph < 0 ? -1 : 0;
        }
    }
    PyObject *first = call->nargs ? argument(call, 0) : NULL;
    int dist = first && Py_TYPE(first) == (PyTypeObject *)state->DistTensor;
    int fine = 1;
    if (entry->writes && !aims && !dist) {
        return 0;
    }
    if (dist && (entry->views || (entry->writes && !aims))) {
        fine = nothing_beside(first, state->str._view_state); /* of a copy in place of a view */
    }
    for (Py_ssize_t i = 0; aims && fine > 0 && i < PyList_GET_SIZE(aims); i++) {
        fine = nothing_beside(PyList_GET_ITEM(aims, i), state->str._view_state);
    }
    if (entry->pending && fine > 0) {
        if (call->nnamed || call->nargs > 2) {
            return 0;
        }
        for (Py_ssize_t i = 0; fine > 0 && i < call->nargs; i++) {
            PyObject *x = argument(call, i);
            if (Py_TYPE(x) == (PyTypeObject *)state->DistTensor) {
                fine = nothing_beside(x, state->str._reduced);
            }
            else if (PyList_CheckExact(x) || PyTuple_CheckExact(x)) {
                return 0;
            }
        }
    }
    return fine;
}

/* Read the locals, call the function on them, wrap the results. */
static PyObject *
direct(State *state, Entry *entry, Call *call)
{
    PyObject *aims = NULL, *plain = NULL, *result = NULL, *out = NULL;
    /* the first is for who is called: see PY_VECTORCALL_ARGUMENTS_OFFSET */
    PyObject *stack[MOST_ARGUMENTS + 1], **locals = stack + 1;
    Py_ssize_t n = 0;
    stack[0] = NULL;
    if (entry->writes && !(entry->ntargets == 1 && entry->targets[0] == 0
                           && Py_TYPE(call->nargs ? argument(call, 0) : Py_None)
                                  == (PyTypeObject *)state->DistTensor)) {
        plain = entry->uncounted ? PyList_New(0) : NULL;
        aims = entry->uncounted && !plain ? NULL : targets(state, entry, call, plain);
        if (!aims) {
            Py_XDECREF(plain);
            return NULL;
        }
    }
    int fine = fits(state, entry, call, aims);
    if (fine <= 0) {
        Py_XDECREF(plain);
        Py_XDECREF(aims);
        return fine < 0 ? NULL : call_runner(state, entry, call);
    }
    state->in_c++;
    for (; n < entry->nuses; n++) {
        PyObject *value = argument(call, n);
        const Use *use = &entry->uses[n];
        locals[n] = use->how == CONSTANT  ? Py_NewRef(value)
                    : use->how == LOCAL   ? get(state->local, value)
                    : use->how == VARYING ? local_for(state, value, use->axes)
                                          : locals_of(state, value);
        if (!locals[n]) {
            goto end;
        }
    }
    out = PyObject_Vectorcall(entry->local_fn, locals,
                              (size_t)entry->nargs | PY_VECTORCALL_ARGUMENTS_OFFSET,
                              PyTuple_GET_SIZE(entry->names) ? entry->names : NULL);
    if (!out) {
        goto end;
    }
    if (entry->writes) {
        result = written_all(state, entry, call, aims, plain, out);
        goto end;
    }
    if (entry->nargs && entry->uses[0].how != CONSTANT
        && Py_TYPE(argument(call, 0)) == (PyTypeObject *)state->DistTensor) {
        PyObject *local = get(state->local, argument(call, 0));
        if (local == out) {
            result = Py_NewRef(argument(call, 0));
        }
        Py_XDECREF(local);
        if (result || !local) {
            Py_DECREF(out);
            goto end;
        }
    }
    int graph = 0;
    if (entry->derives && PyObject_TypeCheck(out, (PyTypeObject *)state->Tensor)) {
        graph = in_graph(state, out);
        if (graph < 0) {
            Py_DECREF(out);
            goto end;
        }
    }
    result = wrap_outputs(state, entry, out);
    if (result && graph) {
        int made = as_python(call);
        PyObject *args[] = {entry->plan, call->args, call->kwargs ? call->kwargs : Py_None, result};
        PyObject *done = made ? PyObject_Vectorcall(state->derive, args, 4, NULL) : NULL;
        if (!done) {
            Py_CLEAR(result);
        }
        Py_XDECREF(done);
    }
end:
    while (n > 0) {
        Py_XDECREF(locals[--n]);
    }
    Py_XDECREF(plain);
    Py_XDECREF(aims);
    return result;
}

/* The token of a result outside the mesh, from those of its sources. NULL without an error: there
 * are two of transfers, which Python joins. */
static PyObject *
join(State *state, Entry *entry, const Call *call)
{
    PyObject *joined = Py_NewRef(entry->nothing);
    for (Py_ssize_t i = 0; i < entry->nsources; i++) {
        PyObject *local = get(state->local, argument(call, entry->sources[i]));
        int needs = local ? 0 : -1, transfer = 0;
        if (!local || local == joined || local == entry->nothing) {
            /* adds nothing */
        }
        else if (local == entry->orphan) {
            needs = 1;
        }
        else if (Py_TYPE(local) != (PyTypeObject *)state->Tensor) {
            Py_DECREF(local);
            Py_DECREF(joined);
            return NULL;
        }
        else {
            PyObject *node = get(state->grad_fn, local);
            transfer = node && node != Py_None;
            needs = !node ? -1 : transfer ? 1 : is_true(get(state->requires_grad, local));
            Py_XDECREF(node);
        }
        if (needs < 0 || (transfer && joined != entry->nothing && joined != entry->orphan)) {
            Py_XDECREF(local);
            Py_DECREF(joined);
            return NULL;
        }
        if (transfer) {
            Py_SETREF(joined, Py_NewRef(local));
        }
        else if (needs && joined == entry->nothing) {
            Py_SETREF(joined, Py_NewRef(entry->orphan));
        }
        Py_DECREF(local);
    }
    if (joined != entry->nothing) {
        int graph = is_true(PyObject_CallNoArgs(state->is_grad_enabled));
        if (graph < 0) {
            Py_CLEAR(joined);
        }
        else if (!graph) {
            Py_SETREF(joined, Py_NewRef(entry->nothing));
        }
    }
    return joined;
}

/* Is a context variable something else than None? -1: an error. */
static int
is_set(PyObject *variable)
{
    PyObject *value;
    if (PyContextVar_Get(variable, NULL, &value) < 0) {
        return -1;
    }
    Py_XDECREF(value);
    return value && value != Py_None;
}

/* One more transfer of this channel, in which this rank has no part: as next_tag. 0: an error. */
static int
count_transfer(State *state)
{
    PyObject *channel, *before, *after = NULL;
    if (PyContextVar_Get(state->CHANNEL, NULL, &channel) < 0) {
        return 0;
    }
    PyObject *world = channel ? PyObject_CallNoArgs(state->current_world) : NULL;
    PyObject *tags = world ? PyObject_GetAttr(world, state->str.tags) : NULL;
    int counted = 0;
    if (tags && PyDict_CheckExact(tags)) {
        before = PyDict_GetItemWithError(tags, channel);
        long long count = before ? PyLong_AsLongLong(before) : 0;
        after = PyErr_Occurred() ? NULL : PyLong_FromLongLong(count + 1);
        counted = after && PyDict_SetItem(tags, channel, after) == 0;
    }
    if (!counted && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_SystemError, "a world counts transfers in a dict");
    }
    Py_XDECREF(after);
    Py_XDECREF(tags);
    Py_XDECREF(world);
    Py_XDECREF(channel);
    return counted;
}

/* A call on a rank outside the mesh: a new wrapper for each result, and no kernel. */
static PyObject *
quick(State *state, Entry *entry, Call *call)
{
    int apart = entry->passes ? is_set(state->TAPE) : 0; /* is there more to it than tokens? */
    if (entry->passes && !apart) {
        apart = is_set(state->REGION);
    }
    else if (!entry->passes) {
        apart = is_true(PyObject_CallNoArgs(state->autocast_is_on));
    }
    if (apart < 0) {
        return NULL;
    }
    if (entry->nuses != call->nargs + call->nnamed || apart || !entry->noutputs
        || (entry->kind == Py_None && entry->noutputs != 1)) {
        return call_runner(state, entry, call);
    }
    int fine = entry->pending ? fits(state, entry, call, NULL) : 1;
    PyObject *joined = fine > 0 ? join(state, entry, call) : NULL;
    if (!joined) {
        return PyErr_Occurred() ? NULL : call_runner(state, entry, call);
    }
    if (entry->passes && !count_transfer(state)) {
        Py_DECREF(joined);
        return NULL;
    }
    state->in_c++;
    if (entry->kind == Py_None && entry->shared[0] < 0) {
        return wrap(state, entry->outputs, joined);
    }
    PyObject *results = PyTuple_New(entry->noutputs);
    for (Py_ssize_t i = 0; results && i < entry->noutputs; i++) {
        PyObject *new = wrap(state, &entry->outputs[i], Py_NewRef(joined));
        if (new && entry->shared[i] >= 0) {
            PyObject *base = argument(call, entry->shared[i]);
            PyObject *done = PyObject_CallFunctionObjArgs(state->share, new, base, NULL);
            if (!done) {
                Py_CLEAR(new);
            }
            Py_XDECREF(done);
        }
        PyTuple_SET_ITEM(results, i, new);
        if (!new) {
            Py_CLEAR(results);
        }
    }
    Py_DECREF(joined);
    if (results && entry->kind == Py_None) {
        Py_SETREF(results, Py_NewRef(PyTuple_GET_ITEM(results, 0)));
    }
    else if (results && entry->kind == (PyObject *)&PyList_Type) {
        Py_SETREF(results, PySequence_List(results));
    }
    return results;
}

static PyObject *carry_out(State *, Call *);
static int calls_are_ours(State *);

/* May C make a call of x, after it has reduced x where that is pending? Not where an earlier call has
 * reduced x, as Python looks whether that still is its value; and gradients are reduced in the
 * optimizer's way. -1: an error. */
static int
reducible(State *state, PyObject *x, int pending)
{
    int fine = nothing_beside(x, state->str._reduced);
    PyObject *grad_state = fine > 0 && pending ? PyObject_GetAttr(x, state->str._grad_state) : NULL;
    if (grad_state && Py_TYPE(grad_state) == (PyTypeObject *)state->GradState) {
        fine = is_none(grad_state, state->str.owner);
    }
    else if (grad_state) {
        fine = grad_state == Py_None;
    }
    else if (fine > 0 && pending) {
        fine = -1;
    }
    Py_XDECREF(grad_state);
    return fine;
}

/* Are there only integers in a list or tuple, as a shape? */
static int
is_shape(PyObject *value)
{
    int list = PyList_CheckExact(value);
    Py_ssize_t n = list ? PyList_GET_SIZE(value) : PyTuple_GET_SIZE(value);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!PyLong_CheckExact(list ? PyList_GET_ITEM(value, i) : PyTuple_GET_ITEM(value, i))) {
            return 0;
        }
    }
    return 1;
}

/* What C reduces each argument to, or NULL. 0: Python carries the call out. -1: an error. */
static int
find_wholes(State *state, Entry *entry, const Call *call, PyObject **wholes)
{
    Py_ssize_t known = PyTuple_GET_SIZE(entry->wholes), ntensors = 0;
    int fine = !call->nnamed && state->nested < MOST_NESTED && calls_are_ours(state);
    for (Py_ssize_t i = 0; fine > 0 && i < call->nargs; i++) {
        PyObject *x = argument(call, i);
        PyTypeObject *type = Py_TYPE(x);
        int dist = type == (PyTypeObject *)state->DistTensor;
        wholes[i] = NULL;
        if (dist || type == (PyTypeObject *)state->Tensor
            || type == (PyTypeObject *)state->Parameter) {
            PyObject *whole = ntensors < known ? PyTuple_GET_ITEM(entry->wholes, ntensors) : Py_None;
            ntensors++;
            if (dist) {
                wholes[i] = whole == Py_None ? NULL : whole;
                fine = reducible(state, x, wholes[i] != NULL);
            }
        }
        else if (type == &PyList_Type || type == &PyTuple_Type) {
            fine = is_shape(x);
        }
    }
    if (fine > 0) {
        PyObject *depth = PyObject_CallNoArgs(state->strict_depth);
        long blocks = depth ? PyLong_AsLong(depth) : -1;
        fine = blocks < 0 ? -1 : blocks == 0 && ntensors == known;
        Py_XDECREF(depth);
    }
    return fine;
}

/* A call that does pending sums: each is done once and kept beside its tensor (remember), and the
 * call is made of what came out. */
static PyObject *
reduce(State *state, Entry *entry, Call *call)
{
    Py_ssize_t n = call->nargs;
    PyObject *wholes[MOST_ARGUMENTS], *result = NULL, *args;
    int fine = find_wholes(state, entry, call, wholes);
    if (fine <= 0) {
        return fine < 0 ? NULL : call_runner(state, entry, call);
    }
    args = PyTuple_New(n);
    for (Py_ssize_t i = 0; args && i < n; i++) { /* each once, and the others as they are */
        PyObject *x = argument(call, i), *value = NULL;
        for (Py_ssize_t k = 0; k < n; k++) {
            if (wholes[k] && argument(call, k) == x) {
                wholes[i] = wholes[k];
                value = k < i ? PyTuple_GET_ITEM(args, k) : value;
            }
        }
        value = value       ? Py_NewRef(value)
                : wholes[i] ? PyObject_CallFunctionObjArgs(state->remember, x, wholes[i], NULL)
                            : Py_NewRef(x);
        if (value) {
            PyTuple_SET_ITEM(args, i, value);
        }
        else {
            Py_CLEAR(args);
        }
    }
    if (!args) {
        return NULL;
    }
    Call again; /* most of it is left as it is */
    again.func = call->func;
    again.args = args;
    again.kwargs = NULL;
    again.first = &PyTuple_GET_ITEM(args, 0);
    again.nargs = n;
    again.nnamed = 0;
    again.reshards = 0;
    state->in_c++;
    state->nested++;
    result = carry_out(state, &again);
    state->nested--;
    for (Py_ssize_t i = 0; result && i < n; i++) {
        if (wholes[i] && result == PyTuple_GET_ITEM(args, i)) { /* as of x.contiguous() */
            Py_SETREF(result, Py_NewRef(argument(call, i)));
            break;
        }
    }
    Py_DECREF(args);
    return result;
}

/* Of a question that the key answers. */
static PyObject *
answer(State *state, Entry *entry)
{
    state->in_c++;
    return Py_NewRef(entry->answer);
}

/* Gradients ----------------------------------------------------------------------------------- */

/* Put the gradient of a leaf into *total. 0: there are two by now. -1: an error. */
static int
one_grad(State *state, PyObject *leaf, PyObject **total)
{
    PyObject *grad = get(state->grad, leaf);
    if (!grad || grad == Py_None) {
        Py_XDECREF(grad);
        return grad ? 1 : -1;
    }
    if (*total) {
        Py_DECREF(grad);
        return 0;
    }
    *total = grad;
    return 1;
}

/* The same, of the aliases of a leaf: as grad_leaves says. */
static int
alias_grads(State *state, PyObject *local, PyObject *aliases, PyObject **total)
{
    int fine = PyDict_CheckExact(aliases) ? is_true(get(state->is_leaf, local)) : 0;
    PyObject *axes, *hit;
    Py_ssize_t at = 0;
    while (fine > 0 && PyDict_Next(aliases, &at, &axes, &hit)) {
        int overflow;
        if (!PyTuple_CheckExact(hit) || PyTuple_GET_SIZE(hit) != 3) {
            return 0; /* it is (alias, made at, region) */
        }
        long made_at = PyLong_AsLongAndOverflow(PyTuple_GET_ITEM(hit, 1), &overflow);
        if (made_at < 0 && !overflow) {
            PyObject *alias = Py_NewRef(PyTuple_GET_ITEM(hit, 0));
            fine = PyErr_Occurred() ? -1 : one_grad(state, alias, total);
            Py_DECREF(alias);
        }
    }
    return fine;
}

/* What .grad of x gave last, where it still is what one leaf has collected; or None. NULL without
 * an error: Python knows. */
static PyObject *
known_grad(State *state, PyObject *x)
{
    PyObject *local = get(state->local, x), *dict = local ? PyObject_GenericGetDict(x, NULL) : NULL;
    PyObject *grad_state = NULL, *fields = NULL, *total = NULL, *aliases, *known, *result = NULL;
    if (!dict || one_grad(state, local, &total) <= 0) {
        goto end;
    }
    grad_state = Py_XNewRef(beside(dict, state->str._grad_state));
    if (!grad_state) {
        result = total || PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
        goto end;
    }
    /* its class has None for what is not in its __dict__, and no former aliases */
    fields = Py_TYPE(grad_state) == (PyTypeObject *)state->GradState
                 ? PyObject_GenericGetDict(grad_state, NULL)
                 : NULL;
    if (!fields || beside(fields, state->str.collector)) {
        goto end;
    }
    PyObject *former = beside(fields, state->str.former);
    if (former && (!PyTuple_CheckExact(former) || PyTuple_GET_SIZE(former))) {
        goto end;
    }
    aliases = Py_XNewRef(beside(fields, state->str.aliases));
    int fine = aliases ? alias_grads(state, local, aliases, &total) : 1;
    Py_XDECREF(aliases);
    if (fine <= 0 || PyErr_Occurred()) {
        goto end;
    }
    if (!total) {
        result = Py_NewRef(Py_None);
        goto end;
    }
    known = beside(fields, state->str.grad);
    if (known && Py_TYPE(known) == (PyTypeObject *)state->DistTensor) {
        Py_INCREF(known);
        PyObject *its = get(state->local, known);
        result = its == total ? Py_NewRef(known) : NULL;
        Py_XDECREF(its);
        Py_DECREF(known);
    }
end:
    Py_XDECREF(total);
    Py_XDECREF(fields);
    Py_XDECREF(grad_state);
    Py_XDECREF(dict);
    Py_XDECREF(local);
    return result;
}

/* x.grad = None, which each step says of each parameter: on the local and on the aliases of a leaf.
 * 0: there is more to it, and nothing was done. -1: an error. */
static int
drop_grads(State *state, PyObject *x)
{
    PyObject *local = get(state->local, x), *aliases = NULL, *made_of = NULL, *former = NULL;
    PyObject *grad_state = local ? PyObject_GetAttr(x, state->str._grad_state) : NULL;
    int done = grad_state ? 1 : -1;
    if (done > 0 && grad_state != Py_None) {
        done = is_none(grad_state, state->str.collector);
        done = done > 0 ? is_none(grad_state, state->str.origin) : done;
        former = done > 0 ? PyObject_GetAttr(grad_state, state->str.former) : NULL;
        aliases = former ? PyObject_GetAttr(grad_state, state->str.aliases) : NULL;
        done = done > 0 && !aliases ? -1 : done;
        if (done > 0) {
            int fine = PyTuple_CheckExact(former) && !PyTuple_GET_SIZE(former)
                       && (aliases == Py_None || PyDict_CheckExact(aliases));
            made_of = !fine || aliases == Py_None ? NULL : PyDict_Values(aliases);
            done = fine && (made_of || aliases == Py_None);
        }
        for (Py_ssize_t i = 0; done > 0 && made_of && i < PyList_GET_SIZE(made_of); i++) {
            PyObject *hit = PyList_GET_ITEM(made_of, i); /* (alias, made at, region) */
            done = PyTuple_CheckExact(hit) && PyTuple_GET_SIZE(hit) == 3;
            long made_at = done ? PyLong_AsLong(PyTuple_GET_ITEM(hit, 1)) : 0;
            if (made_at < 0) {
                done = PyErr_Occurred() || set(state->grad, PyTuple_GET_ITEM(hit, 0), Py_None) < 0
                           ? -1
                           : 1;
            }
        }
        if (done > 0 && PyObject_SetAttr(grad_state, state->str.grad, Py_None) < 0) {
            done = -1;
        }
    }
    if (done > 0 && set(state->grad, local, Py_None) < 0) {
        done = -1;
    }
    Py_XDECREF(made_of);
    Py_XDECREF(aliases);
    Py_XDECREF(former);
    Py_XDECREF(grad_state);
    Py_XDECREF(local);
    return done;
}

static int
set_grad(PyObject *self, PyObject *value, void *Py_UNUSED(closure))
{
    State *state = configured;
    if (!state) {
        PyErr_SetString(PyExc_RuntimeError, "a gradient of a DistTensor while Python ends");
        return -1;
    }
    int ours = state->shortcuts && Py_TYPE(self) == (PyTypeObject *)state->DistTensor;
    int done = ours && value == Py_None ? drop_grads(state, self) : 0;
    return done < 0 ? -1 : done ? 0 : set(state->dist_grad, self, value);
}

static PyObject *
get_grad(PyObject *self, void *Py_UNUSED(closure))
{
    State *state = configured;
    if (!state) {
        PyErr_SetString(PyExc_RuntimeError, "a gradient of a DistTensor while Python ends");
        return NULL;
    }
    PyObject *known = NULL;
    if (state->shortcuts && Py_TYPE(self) == (PyTypeObject *)state->DistTensor) {
        known = known_grad(state, self);
    }
    return known || PyErr_Occurred() ? known : get(state->dist_grad, self);
}

PyDoc_STRVAR(waiting_doc, "waiting(params)\n--\n\nAs disttensor.tensor.grad_sync.waiting.");

/* Most gradients have the spec of one before, which is looked at once. */
static PyObject *
waiting(PyObject *module, PyObject *params)
{
    State *state = PyModule_GetState(module);
    if (!state->DistTensor || !PyList_CheckExact(params)) {
        PyErr_SetString(PyExc_TypeError, "waiting takes a list of parameters");
        return NULL;
    }
    PyObject *found = PyList_New(0), *whole = Py_NewRef(Py_None); /* a spec that waits for nothing */
    for (Py_ssize_t i = 0; found && i < PyList_GET_SIZE(params); i++) {
        PyObject *x = PyList_GET_ITEM(params, i);
        if (Py_TYPE(x) != (PyTypeObject *)state->DistTensor) {
            continue;
        }
        Py_INCREF(x);
        PyObject *grad = get_grad(x, NULL), *spec = NULL, *member = NULL;
        int waits = grad ? 0 : -1;
        if (grad && grad != Py_None) {
            spec = PyObject_GetAttr(grad, state->str.spec);
            waits = spec ? spec != whole : -1;
        }
        if (waits > 0) {
            PyObject *layout = PyObject_GetAttr(spec, state->str.layout);
            PyObject *partial = layout ? PyObject_GetAttr(layout, state->str.partial) : NULL;
            waits = partial ? PyObject_IsTrue(partial) : -1;
            Py_XDECREF(partial);
            Py_XDECREF(layout);
            if (!waits) {
                Py_SETREF(whole, Py_NewRef(spec));
            }
        }
        if (waits > 0) {
            member = Py_BuildValue("(nOO)", i, x, grad);
            waits = member ? PyList_Append(found, member) : -1;
        }
        if (waits < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(member);
        Py_XDECREF(spec);
        Py_XDECREF(grad);
        Py_DECREF(x);
    }
    Py_DECREF(whole);
    return found;
}

static PyGetSetDef grad_definition = {"grad", get_grad, set_grad, "As torch.Tensor.grad.", NULL};

/* Dispatch ------------------------------------------------------------------------------------ */

/* The first call of a kind: Python carries it out, and what it chose is entered. */
static PyObject *
first_call(State *state, Call *call, uint64_t hash, const Words *words, PyObject *kept)
{
    state->misses++;
    PyObject *kwargs = call->kwargs ? call->kwargs : Py_None;
    PyObject *found = call->reshards
                          ? PyObject_Vectorcall(state->first_reshard, call->first, 3, NULL)
                          : PyObject_CallFunctionObjArgs(state->first_call, call->func, call->args,
                                                         kwargs, NULL);
    if (!found) {
        return NULL;
    }
    if (!PyTuple_CheckExact(found) || PyTuple_GET_SIZE(found) != 2) {
        PyErr_SetString(PyExc_SystemError, "first_call gives (result, plan)");
        Py_DECREF(found);
        return NULL;
    }
    PyObject *result = Py_NewRef(PyTuple_GET_ITEM(found, 0)), *plan = PyTuple_GET_ITEM(found, 1);
    /* it may have been entered meanwhile, by a call inside of this one */
    if (plan != Py_None && state->first_call && !known(state, words, hash)) {
        Entry *entry = new_entry(state, words, hash, kept, plan);
        if (entry && !enter(state, entry)) {
            release(entry);
        }
    }
    Py_DECREF(found);
    return result;
}

/* Python carries the call out. */
static PyObject *
call_python(State *state, Call *call)
{
    state->unsure++;
    if (call->reshards) {
        return PyObject_Vectorcall(state->reshard, call->first, 3, NULL);
    }
    PyObject *kwargs = call->kwargs ? call->kwargs : Py_None;
    return PyObject_CallFunctionObjArgs(state->dispatch, state->DistTensor, call->func, Py_None,
                                        call->args, kwargs, NULL);
}

/* The call has raised, maybe on this rank alone. */
static void
note_error(State *state, PyObject *plan)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *done = PyObject_CallFunctionObjArgs(state->note_error, error, plan, NULL);
    if (!done) {
        PyErr_Clear();
    }
    Py_XDECREF(done);
    PyErr_Restore(type, error, trace);
}

/* A call that is known. */
static PyObject *
run(State *state, Entry *entry, Call *call)
{
    PyObject *result = NULL;
    entry->references++;
    state->hits++;
    PyObject *done = entry->noted ? PyObject_CallOneArg(state->note, entry->plan) : NULL;
    if (done || !entry->noted) {
        result = entry->how == DIRECT     ? direct(state, entry, call)
                 : entry->how == OFF_MESH ? quick(state, entry, call)
                 : entry->how == REDUCE   ? reduce(state, entry, call)
                 : entry->how == ANSWER   ? answer(state, entry)
                                          : call_runner(state, entry, call);
    }
    Py_XDECREF(done);
    if (!result && entry->noted) {
        note_error(state, entry->plan);
    }
    release(entry);
    return result;
}

static PyObject *
carry_out(State *state, Call *call)
{
    Words words; /* most of it is left as it is */
    words.at = words.here;
    words.length = 0;
    words.room = SHORT;
    PyObject *result = NULL;
    if (!add_call(state, &words, call, NULL)) {
        goto unsure;
    }
    uint64_t hash = hash_of(&words);
    Entry *entry = known(state, &words, hash);
    if (entry) {
        result = run(state, entry, call);
    }
    else {
        Py_ssize_t length = words.length;
        PyObject *kept = PyList_New(0);
        words.length = 0;
        if (!kept || !add_call(state, &words, call, kept) || words.length != length
            || hash_of(&words) != hash) {
            Py_XDECREF(kept);
            goto unsure;
        }
        result = first_call(state, call, hash, &words, kept);
        Py_DECREF(kept);
    }
    if (words.at != words.here) {
        PyMem_Free(words.at);
    }
    return result;
unsure:
    if (words.at != words.here) {
        PyMem_Free(words.at);
    }
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return NULL; /* such as KeyboardInterrupt, in code of the user's */
    }
    PyErr_Clear();
    return call_python(state, call);
}

/* Does torch bring calls to __torch_function__ of the class, and to nobody before? */
static int
calls_are_ours(State *state)
{
    int seen = is_true(PyObject_CallNoArgs(state->functions_are_seen));
    int modes = seen > 0 ? is_true(PyObject_CallNoArgs(state->modes_see_functions)) : 0;
    if (seen < 0 || modes < 0) {
        PyErr_Clear();
        return 0;
    }
    return seen && !modes;
}

/* A method of a DistTensor. A call whose words are known is carried out at once: torch has checked
 * the arguments of one like it. All others go torch's way, which ends in dispatch. */
static PyObject *
method(int number, PyObject *self, PyObject *const *given, Py_ssize_t n, PyObject *keywords)
{
    State *state = configured;
    if (!state) {
        PyErr_SetString(PyExc_RuntimeError, "a call of a DistTensor while Python ends");
        return NULL;
    }
    PyObject *result = NULL, *stack[MOST_ARGUMENTS + 1];
    Py_ssize_t named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    const Method *of = &state->methods[number];
    if (n + named >= MOST_ARGUMENTS) {
        PyObject *bound = PyObject_CallMethod(of->plain, "__get__", "O", self);
        result = bound ? PyObject_Vectorcall(bound, given, (size_t)n, keywords) : NULL;
        Py_XDECREF(bound);
        return result;
    }
    stack[0] = self;
    memcpy(stack + 1, given, (size_t)(n + named) * sizeof(PyObject *));
    if (state->shortcuts && Py_TYPE(self) == (PyTypeObject *)state->DistTensor
        && state->nested < MOST_NESTED && calls_are_ours(state)) {
        Call call; /* most of it is left as it is */
        call.func = of->asked;
        call.args = call.kwargs = NULL;
        call.reshards = 0;
        call.first = stack;
        call.nargs = n + 1;
        call.nnamed = named;
        for (Py_ssize_t i = 0; i < named; i++) {
            call.names[i] = PyTuple_GET_ITEM(keywords, i);
            call.values[i] = given[n + i];
        }
        Words words; /* most of it is left as it is */
        words.at = words.here;
        words.length = 0;
        words.room = SHORT;
        Entry *entry = NULL;
        if (add_call(state, &words, &call, NULL)) {
            entry = known(state, &words, hash_of(&words));
        }
        if (words.at != words.here) {
            PyMem_Free(words.at);
        }
        if (entry) {
            state->past++;
            state->nested++;
            result = run(state, entry, &call);
            state->nested--;
            Py_XDECREF(call.args);
            Py_XDECREF(call.kwargs);
            return result;
        }
        if (PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_Exception)) {
                return NULL;
            }
            PyErr_Clear();
        }
    }
    return PyObject_Vectorcall(of->plain, stack, (size_t)n + 1, keywords);
}

#define DEFINE(name, asked) \
    static PyObject *method_##name(PyObject *self, PyObject *const *given, Py_ssize_t n, \
                                   PyObject *keywords) \
    { \
        return method(METHOD_##name, self, given, n, keywords); \
    }
METHODS(DEFINE)
#undef DEFINE

static PyMethodDef definitions[] = {
#define DEFINITION(name, asked) \
    {#name, (PyCFunction)(void (*)(void))method_##name, METH_FASTCALL | METH_KEYWORDS, \
     "As torch.Tensor." #name "."},
    METHODS(DEFINITION)
#undef DEFINITION
};

static const char *const asked_names[] = {
#define ASKED(name, asked) #asked,
    METHODS(ASKED)
#undef ASKED
};

PyDoc_STRVAR(dispatch_doc, "dispatch(func, types, args=(), kwargs=None)\n--\n\n"
"DistTensor.__torch_function__. As a builtin it is no method, and torch gets it unbound.");

static PyObject *
dispatch(PyObject *module, PyObject *const *given, Py_ssize_t n, PyObject *keywords)
{
    State *state = PyModule_GetState(module);
    if (!state->dispatch) {
        PyErr_SetString(PyExc_RuntimeError, "a call of a DistTensor while Python ends");
        return NULL;
    }
    Call call; /* most of it is left as it is */
    call.func = call.args = call.kwargs = NULL;
    call.first = NULL;
    call.nnamed = 0;
    call.reshards = 0;
    if (!keywords && n >= 3 && n <= 4) {
        call.func = given[0];
        call.args = given[2];
        call.kwargs = n < 4 || given[3] == Py_None ? NULL : given[3];
    }
    if (!call.args || !PyTuple_CheckExact(call.args)
        || (call.kwargs && !PyDict_CheckExact(call.kwargs))
        || PyTuple_GET_SIZE(call.args) > MOST_ARGUMENTS
        || (call.kwargs
            && PyTuple_GET_SIZE(call.args) + PyDict_GET_SIZE(call.kwargs) > MOST_ARGUMENTS)) {
        PyObject *stack[MOST_ARGUMENTS + 1]; /* as it was called, with the class before it */
        Py_ssize_t more = keywords ? PyTuple_GET_SIZE(keywords) : 0;
        if (n + more > MOST_ARGUMENTS) {
            PyErr_SetString(PyExc_TypeError, "dispatch takes func, types, args and kwargs");
            return NULL;
        }
        stack[0] = state->DistTensor;
        memcpy(stack + 1, given, (size_t)(n + more) * sizeof(PyObject *));
        return PyObject_Vectorcall(state->dispatch, stack, (size_t)n + 1, keywords);
    }
    call.nargs = PyTuple_GET_SIZE(call.args);
    call.first = &PyTuple_GET_ITEM(call.args, 0);
    PyObject *name, *value, *result = NULL;
    Py_ssize_t at = 0;
    while (call.kwargs && PyDict_Next(call.kwargs, &at, &name, &value)) {
        call.names[call.nnamed] = Py_NewRef(name);
        call.values[call.nnamed++] = Py_NewRef(value);
    }
    state->nested++;
    result = state->nested > MOST_NESTED ? call_python(state, &call) : carry_out(state, &call);
    state->nested--;
    while (call.nnamed) {
        Py_DECREF(call.names[--call.nnamed]);
        Py_DECREF(call.values[call.nnamed]);
    }
    return result;
}

PyDoc_STRVAR(reshard_doc, "reshard(x, mesh, placements)\n--\n\n"
"What carries out dt.reshard of a DistTensor.");

static PyObject *
reshard(PyObject *module, PyObject *const *given, Py_ssize_t n)
{
    State *state = PyModule_GetState(module);
    if (!state->first_reshard || n != 3) {
        PyErr_SetString(PyExc_RuntimeError, "reshard takes three arguments, before Python ends");
        return NULL;
    }
    Call call; /* most of it is left as it is */
    call.func = state->first_reshard;
    call.args = call.kwargs = NULL;
    call.first = given;
    call.nargs = n;
    call.nnamed = 0;
    call.reshards = 1;
    state->nested++;
    PyObject *result = state->nested > MOST_NESTED ? call_python(state, &call)
                                                   : carry_out(state, &call);
    state->nested--;
    Py_XDECREF(call.args);
    Py_XDECREF(call.kwargs);
    return result;
}

PyDoc_STRVAR(wrap_doc, "wrap(local, spec)\n--\n\nAs disttensor.tensor.dist_tensor.wrap.");

static PyObject *
wrap_method(PyObject *module, PyObject *const *given, Py_ssize_t n)
{
    State *state = PyModule_GetState(module);
    if (!state->idle || n != 2) {
        PyErr_SetString(PyExc_TypeError, "wrap takes a local and a spec");
        return NULL;
    }
    PyObject *idle = get(state->idle, given[1]); /* None: no call gives such tensors */
    PyObject *new = idle ? wrap_as(state, idle, NULL, Py_NewRef(given[0]), given[1]) : NULL;
    Py_XDECREF(idle);
    return new;
}

/* The module ---------------------------------------------------------------------------------- */

PyDoc_STRVAR(configure_doc, "configure(**references)\n--\n\n"
"What this code calls and looks at, by the names of REFERENCES.");

static PyObject *
configure(PyObject *module, PyObject *args, PyObject *kwargs)
{
    State *state = PyModule_GetState(module);
    PyObject *value;
    if (PyTuple_GET_SIZE(args) || !kwargs) {
        PyErr_SetString(PyExc_TypeError, "configure takes keyword arguments");
        return NULL;
    }
#define CHECK(name) \
    if (!PyDict_GetItemString(kwargs, #name)) { \
        return PyErr_Format(PyExc_TypeError, "configure needs " #name); \
    }
    REFERENCES(CHECK)
#undef CHECK
#define DESCRIPTOR(name) \
    value = PyDict_GetItemString(kwargs, #name); \
    if (!Py_TYPE(value)->tp_descr_get || !Py_TYPE(value)->tp_descr_set) { \
        return PyErr_Format(PyExc_TypeError, #name " is not an attribute that can be set"); \
    }
    DESCRIPTOR(local)
    DESCRIPTOR(spec)
    DESCRIPTOR(idle)
    DESCRIPTOR(shape)
    DESCRIPTOR(dtype)
    DESCRIPTOR(requires_grad)
    DESCRIPTOR(grad_fn)
    DESCRIPTOR(grad)
    DESCRIPTOR(is_leaf)
    DESCRIPTOR(dist_grad)
#undef DESCRIPTOR
    if (!PyDict_CheckExact(PyDict_GetItemString(kwargs, "LIVE"))
        || !PyList_CheckExact(PyDict_GetItemString(kwargs, "INFERENCE"))) {
        return PyErr_Format(PyExc_TypeError, "LIVE is a dict, and INFERENCE a list");
    }
    if (state->dispatch) { /* calls that run use what is there */
        PyErr_SetString(PyExc_RuntimeError, "configure is called once");
        return NULL;
    }
#define TAKE(name) \
    value = PyDict_GetItemString(kwargs, #name); \
    Py_XSETREF(state->name, Py_NewRef(value));
    REFERENCES(TAKE)
#undef TAKE
    PyTypeObject *type = (PyTypeObject *)state->DistTensor;
    configured = state;
#if PY_VERSION_HEX < 0x030F0000 /* later ones have not been tried */
    destroy = type->tp_dealloc;
    counted = destroy != ((PyTypeObject *)state->GradState)->tp_dealloc; /* one of torch's own */
    type->tp_dealloc = end_of_life;
#endif
    type->tp_getattr = asked;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(methods_doc, "methods()\n--\n\n"
"The methods that DistTensor gets, by their names: those that are torch.Tensor's own in C. And grad.");

static PyObject *
methods_of(PyObject *module, PyObject *Py_UNUSED(none))
{
    State *state = PyModule_GetState(module);
    if (!state->Tensor) {
        PyErr_SetString(PyExc_RuntimeError, "configure comes first");
        return NULL;
    }
    PyObject *made = PyDict_New();
    for (int i = 0; made && i < N_METHODS; i++) {
        Method *of = &state->methods[i];
        Py_XSETREF(of->plain, PyObject_GetAttrString(state->Tensor, definitions[i].ml_name));
        Py_XSETREF(of->asked, PyObject_GetAttrString(state->Tensor, asked_names[i]));
        if (!of->plain || !of->asked || Py_TYPE(of->plain) != &PyMethodDescr_Type) {
            PyErr_Clear();
            continue;
        }
        PyTypeObject *type = (PyTypeObject *)state->DistTensor;
        PyObject *descriptor = PyDescr_NewMethod(type, &definitions[i]);
        if (!descriptor || PyDict_SetItemString(made, definitions[i].ml_name, descriptor) < 0) {
            Py_CLEAR(made);
        }
        Py_XDECREF(descriptor);
    }
    PyTypeObject *type = (PyTypeObject *)state->DistTensor;
    PyObject *grad = made ? PyDescr_NewGetSet(type, &grad_definition) : NULL;
    if (made && (!grad || PyDict_SetItemString(made, "grad", grad) < 0)) {
        Py_CLEAR(made);
    }
    Py_XDECREF(grad);
    return made;
}

PyDoc_STRVAR(shortcuts_doc, "shortcuts(on)\n--\n\n"
"Do methods look for known calls from now on, or go torch's way?");

static PyObject *
shortcuts(PyObject *module, PyObject *on)
{
    State *state = PyModule_GetState(module);
    PyObject *carrier = PyObject_GetAttrString(module, "dispatch");
    if (!carrier) {
        return NULL;
    }
    Py_XSETREF(state->carrier, carrier);
    state->shortcuts = on == Py_True;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(clear_doc, "clear()\n--\n\nForget all calls.");

static PyObject *
clear(PyObject *module, PyObject *Py_UNUSED(none))
{
    clear_table(PyModule_GetState(module));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(counts_doc, "counts()\n--\n\n"
"Calls so far: known ones, those of them that were carried out in C, first ones of their kind, and\n"
"those without a sure key; known ones that came past torch's parser; wrappers that were used again;\n"
"and how many kinds of calls are known.");

static PyObject *
counts(PyObject *module, PyObject *Py_UNUSED(none))
{
    State *state = PyModule_GetState(module);
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:L,s:n}", "known", state->hits, "in_c",
                         state->in_c, "first", state->misses, "unsure", state->unsure, "past",
                         state->past, "reused", state->reused, "kinds", (Py_ssize_t)state->used);
}

static int
start(PyObject *module)
{
    State *state = PyModule_GetState(module);
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "disttensor's C code runs in the main interpreter only");
        return -1;
    }
#define INTERN(name) \
    state->str.name = PyUnicode_InternFromString(#name); \
    if (!state->str.name) { \
        return -1; \
    }
    NAMES(INTERN)
#undef INTERN
    return PyModule_AddStringConstant(module, "SOURCE", SOURCE);
}

static int
traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = PyModule_GetState(module);
#define VISIT(name) Py_VISIT(state->name);
    REFERENCES(VISIT)
#undef VISIT
    Py_VISIT(state->carrier);
    for (int i = 0; i < N_METHODS; i++) {
        Py_VISIT(state->methods[i].plain);
        Py_VISIT(state->methods[i].asked);
    }
    for (size_t i = 0; state->table && i <= state->mask; i++) {
        Entry *entry = state->table[i];
        if (entry && entry->references == 1) { /* else a call holds it, too */
            Py_VISIT(entry->kept);
            Py_VISIT(entry->plan);
            Py_VISIT(entry->nothing);
            Py_VISIT(entry->orphan);
        }
    }
    return 0;
}

static int
forget(PyObject *module)
{
    State *state = PyModule_GetState(module);
    if (configured == state) {
        configured = NULL;
        ((PyTypeObject *)state->DistTensor)->tp_getattr = NULL;
        if (destroy) {
            ((PyTypeObject *)state->DistTensor)->tp_dealloc = destroy;
        }
    }
    clear_table(state);
    Py_CLEAR(state->carrier);
    for (int i = 0; i < N_METHODS; i++) {
        Py_CLEAR(state->methods[i].plain);
        Py_CLEAR(state->methods[i].asked);
    }
#define CLEAR(name) Py_CLEAR(state->name);
    REFERENCES(CLEAR)
#undef CLEAR
    return 0;
}

static void
end(void *module)
{
    State *state = PyModule_GetState(module);
    if (state) {
        forget(module);
#define CLEAR(name) Py_CLEAR(state->str.name);
        NAMES(CLEAR)
#undef CLEAR
    }
}

static PyMethodDef methods[] = {
    {"dispatch", (PyCFunction)(void (*)(void))dispatch, METH_FASTCALL | METH_KEYWORDS,
     dispatch_doc},
    {"configure", (PyCFunction)(void (*)(void))configure, METH_VARARGS | METH_KEYWORDS,
     configure_doc},
    {"reshard", (PyCFunction)(void (*)(void))reshard, METH_FASTCALL, reshard_doc},
    {"wrap", (PyCFunction)(void (*)(void))wrap_method, METH_FASTCALL, wrap_doc},
    {"waiting", waiting, METH_O, waiting_doc},
    {"clear", clear, METH_NOARGS, clear_doc},
    {"counts", counts, METH_NOARGS, counts_doc},
    {"methods", methods_of, METH_NOARGS, methods_doc},
    {"shortcuts", shortcuts, METH_O, shortcuts_doc},
    {NULL},
};

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, start},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "The warm path of disttensor.dispatch in C: see native.c.",
    .m_size = sizeof(State),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = forget,
    .m_free = end,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
