/* The warm path of disttensor.dispatch in C: ``dispatch`` and ``run`` for the most common calls.
 *
 * A call of a torch function on DistTensors has a key: words of 64 bits, in a bytes object. A dict
 * maps it to a NativePlan, which is made of the plan that Python made at the first call of this key
 * (disttensor/dispatch/call_plan.py). ``run`` then does what disttensor/dispatch/run.py does: it
 * reads the locals, calls the local function on them, and wraps the results. Python carries out all
 * other calls:
 *
 *     C cannot compute the key        disttensor.dispatch.dispatch.dispatch
 *     the first call of a key         dispatch.first_call, which returns the plan, too
 *     the plan is not native,
 *     or an argument does not fit     run.run_planned, before anything has run
 *
 * Calls with equal words have one key in Python (dispatch/key.py). Some words are addresses of
 * objects. The NativePlan keeps these objects alive, so that no other object has their address.
 *
 * Common methods and operators of DistTensor (native.py: METHODS) come here directly, without torch's
 * argument parser, if a call with the same key has run before.
 *
 * Only the public C API of Python is used, and no header of torch: attributes of tensors are read
 * by their descriptors. Python code that runs inside a call may enter this module again or clear the
 * dict, so a plan is held while it runs, and the length of a list is read again after each step. The
 * code relies on the GIL: free-threaded builds of Python are refused, and so are sub-interpreters.
 * There is one module in a process, so its state is a static value.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>

#ifdef Py_GIL_DISABLED
#error "disttensor's C code does not support free-threaded Python (without the GIL)"
#endif
#if SIZEOF_VOID_P != 8
#error "disttensor's C code uses the lowest three bits of addresses"
#endif

#ifndef SOURCE
#define SOURCE "unknown" /* setup.py: the checksum of this file */
#endif

#define MOST_PLANS 16384  /* as many as dispatch.PLANS holds */
#define MOST_ARGUMENTS 24 /* of one call; Python carries out calls with more */
#define MOST_WORDS 4096   /* of a key; Python carries out calls with more */
#define MOST_NESTED 200 /* calls within calls; Python counts the frames of deeper ones */
#define MOST_DEPTH 4    /* lists within lists in a key */

/* The arguments of configure(), by name. */
#define REFERENCES(X) \
    X(DistTensor) X(Tensor) X(Parameter) X(Size) X(Uses) X(Generator) /* classes */ \
    X(RULES) X(integers) /* the table of rules, and a descriptor of Rule */ \
    X(dtype_class) X(memory_format) X(layout) \
    X(CallPlan) X(Answer) X(Out) \
    X(local) X(spec) X(meta_tensor) /* descriptors of DistTensor and DistSpec */ \
    X(shape) X(dtype) X(requires_grad) X(grad_fn) X(is_leaf) /* of Tensor */ \
    X(make_subclass) X(is_grad_enabled) X(autocast_is_on) /* of torch */ \
    X(functions_are_seen) X(modes_see_functions) \
    X(dispatch) X(first_call) X(run_planned) X(note) X(note_error) X(wrap_outputs) X(derive) \
    X(written) X(count) X(share) X(no_grad_token) X(no_source_token) \
    X(LIVE) /* a dict that is mostly empty */

/* Names of attributes. */
#define NAMES(X) \
    X(_uses) X(_view_state) X(_reduced) X(aliases) \
    X(local_for) X(call) X(mesh) X(device) X(value) X(local) X(reads) X(keywords) X(results) \
    X(template) X(is_view) X(derives) X(writes) X(side_writes) X(order) X(untracked_writes) X(may_reuse) \
    X(native) \
    X(dtype) X(strides)

static struct {
#define FIELD(name) PyObject *name;
    REFERENCES(FIELD)
    struct { NAMES(FIELD) } str;
#undef FIELD
    PyObject *plans; /* the dict ``plans`` of the module: key -> NativePlan */
    int enabled;     /* do calls run in C? Not while an observer or a tracer sees them */
    int nested;      /* calls that run now, on all threads */
    long long known, in_c, unsure, first, past; /* so far: see counts() */
} state;

typedef struct {
    PyObject *func, *args, *kwargs; /* args: a tuple, or NULL until as_python; kwargs likewise */
    PyObject *const *first;         /* the positional arguments */
    Py_ssize_t nargs, nnamed;
    PyObject *names[MOST_ARGUMENTS], *values[MOST_ARGUMENTS]; /* of kwargs */
} Call;

static inline PyObject *
argument(const Call *call, Py_ssize_t i)
{
    return i < call->nargs ? call->first[i] : call->values[i - call->nargs];
}

/* Makes the tuple and the dict that Python is called with. 0: an error. */
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
    }
    return call->args && (call->kwargs || !call->nnamed);
}

/* Attributes ---------------------------------------------------------------------------------- */

/* Returns what a descriptor gives for an object, as getattr does, without the look-up of the
 * descriptor. A descriptor itself checks the class of the object. */
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

/* Returns whether an attribute is None. -1: an error. */
static int
is_none(PyObject *x, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(x, name);
    Py_XDECREF(value);
    return value ? value == Py_None : -1;
}

/* Returns whether a function or a descriptor returned True. Steals value. -1: an error. */
static int
is_true(PyObject *value)
{
    Py_XDECREF(value);
    return value ? value == Py_True : -1;
}

static inline int
is_dist(PyObject *x)
{
    return Py_TYPE(x) == (PyTypeObject *)state.DistTensor;
}

static inline int
is_tensor(PyObject *x)
{
    PyTypeObject *type = Py_TYPE(x);
    return type == (PyTypeObject *)state.DistTensor || type == (PyTypeObject *)state.Tensor
           || type == (PyTypeObject *)state.Parameter;
}

/* The key --------------------------------------------------------------------------------------
 *
 * The lowest three bits of a word say what it is. The address of an object ends in 000.
 */
enum { SPEC, OBJECT, INTEGER, MARK, SEQUENCE, KEYWORD = 6, STRING = 7 };
enum { FLOAT, SLICE, REGULAR, SOME_INTEGER, GENERATOR }; /* of a MARK; REGULAR: a torch.Tensor */
enum { TUPLE, LIST, SIZE };     /* of a SEQUENCE */

typedef struct {
    PyObject *kept; /* a list that the objects are appended to, or NULL */
    PyObject *func; /* the function that is called */
    Py_ssize_t length;
    uint64_t at[MOST_WORDS];
} Words;

static int
push(Words *words, uint64_t word)
{
    if (words->length == MOST_WORDS) {
        return 0;
    }
    words->at[words->length++] = word;
    return 1;
}

/* Appends the address of an object, and the object to ``kept``. */
static int
push_object(Words *words, PyObject *object, int tag)
{
    return (!words->kept || PyList_Append(words->kept, object) == 0)
           && push(words, (uint64_t)(uintptr_t)object | (uint64_t)tag);
}

/* Returns whether a plan of a function depends on the values of integers. -1: an error. */
static int
reads_integers(PyObject *func)
{
    PyObject *rule = PyDict_GetItemWithError(state.RULES, func);
    return rule ? is_true(get(state.integers, rule)) : PyErr_Occurred() ? -1 : 1;
}

static int
push_integer(Words *words, PyObject *value)
{
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow && number < 1LL << 59 && number >= -(1LL << 59)
           && push(words, (uint64_t)number << 3 | INTEGER);
}

/* Appends the shape and the dtype of a torch.Tensor. */
static int
add_regular(Words *words, PyObject *tensor)
{
    PyObject *shape = get(state.shape, tensor), *dtype = NULL;
    int certain = shape && PyTuple_Check(shape) && push(words, REGULAR << 3 | MARK)
                  && push(words, (uint64_t)PyTuple_GET_SIZE(shape) << 3 | INTEGER);
    for (Py_ssize_t i = 0; certain && i < PyTuple_GET_SIZE(shape); i++) {
        PyObject *size = PyTuple_GET_ITEM(shape, i);
        certain = PyLong_CheckExact(size) && push_integer(words, size);
    }
    if (certain) {
        dtype = get(state.dtype, tensor); /* torch keeps all dtypes */
        certain = dtype && push_object(words, dtype, OBJECT);
    }
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return certain;
}

/* Appends the words of an argument, as key_of in key.py. 0: C has none; an error may be set. */
static int
add_argument(Words *words, PyObject *value, int depth)
{
    PyTypeObject *type = Py_TYPE(value);
    if (type == (PyTypeObject *)state.DistTensor) {
        PyObject *spec = get(state.spec, value);
        int certain = spec && push_object(words, spec, SPEC);
        Py_XDECREF(spec); /* the tensor has it */
        return certain;
    }
    if (type == &PyLong_Type) {
        int by_value = reads_integers(words->func);
        Py_ssize_t length = words->length;
        if (by_value < 0 || !push_integer(words, value)) {
            return 0;
        }
        if (!by_value) {
            words->at[length] = SOME_INTEGER << 3 | MARK;
        }
        return 1;
    }
    if (value == Py_None || type == &PyBool_Type || value == Py_Ellipsis
        || type == (PyTypeObject *)state.dtype_class
        || type == (PyTypeObject *)state.memory_format || type == (PyTypeObject *)state.layout) {
        return push_object(words, value, OBJECT);
    }
    if (type == &PyFloat_Type) {
        return push(words, FLOAT << 3 | MARK);
    }
    if (type == (PyTypeObject *)state.Generator) {
        return push(words, GENERATOR << 3 | MARK);
    }
    if (type == &PyUnicode_Type) {
        return PyUnicode_CHECK_INTERNED(value) && push_object(words, value, STRING);
    }
    if (depth >= MOST_DEPTH) {
        return 0;
    }
    if (type == &PyTuple_Type || type == &PyList_Type || type == (PyTypeObject *)state.Size) {
        uint64_t kind = type == &PyList_Type ? LIST : type == &PyTuple_Type ? TUPLE : SIZE;
        Py_ssize_t length = PySequence_Fast_GET_SIZE(value);
        int certain = push(words, (uint64_t)length << 5 | kind << 3 | SEQUENCE);
        for (Py_ssize_t i = 0; certain && i < length; i++) {
            if (i >= PySequence_Fast_GET_SIZE(value)) {
                return 0; /* a function mode of torch has changed it */
            }
            PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
            certain = add_argument(words, item, depth + 1);
            Py_DECREF(item);
        }
        return certain && PySequence_Fast_GET_SIZE(value) == length;
    }
    if (type == &PySlice_Type) {
        PySliceObject *slice = (PySliceObject *)value;
        return push(words, SLICE << 3 | MARK) && add_argument(words, slice->start, depth + 1)
               && add_argument(words, slice->stop, depth + 1)
               && add_argument(words, slice->step, depth + 1);
    }
    return is_tensor(value) && add_regular(words, value);
}

/* Returns whether a function lives on. Bound methods and the like are made for each call, and would
 * fill the dict. */
static int
is_lasting(PyObject *func)
{
    PyTypeObject *type = Py_TYPE(func);
    if (type == &PyCFunction_Type) {
        PyObject *self = PyCFunction_GET_SELF(func);
        return !self || self == Py_None || PyModule_Check(self) || PyType_Check(self);
    }
    return type == &PyMethodDescr_Type || type == &PyWrapperDescr_Type || type == &PyFunction_Type;
}

static int
add_call(Words *words, const Call *call)
{
    words->func = call->func;
    if (!is_lasting(call->func) || !push_object(words, call->func, OBJECT)) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < call->nargs + call->nnamed; i++) {
        if (i >= call->nargs) {
            PyObject *name = call->names[i - call->nargs];
            if (!PyUnicode_CheckExact(name) || !PyUnicode_CHECK_INTERNED(name)
                || !push_object(words, name, KEYWORD)) {
                return 0;
            }
        }
        if (!add_argument(words, argument(call, i), 0)) {
            return 0;
        }
    }
    return 1;
}

/* Returns the key of a call, or NULL if C cannot compute it; an error may be set. ``kept``, a
 * list or NULL, gets the objects whose addresses are in the key. */
static PyObject *
key_of(const Call *call, PyObject *kept)
{
    Words words; /* mostly uninitialized, which is faster */
    words.length = 0;
    words.kept = kept;
    if (!add_call(&words, call)) {
        return NULL;
    }
    return PyBytes_FromStringAndSize((char *)words.at, words.length * (Py_ssize_t)sizeof(uint64_t));
}

/* The plan ------------------------------------------------------------------------------------ */

typedef enum { CONSTANT, LOCAL, VARYING, NESTED } ReadKind;

typedef struct {
    ReadKind kind;
    PyObject *axes; /* borrowed from the plan */
} Read;

typedef struct {
    PyObject *spec, *dtype; /* borrowed from the plan */
    PyObject *arguments;    /* of make_subclass: a tuple */
    PyObject *viewed;       /* off the mesh: the number of the tensor that it is a view of, or None */
    PyObject *strides;      /* off the mesh: of such a view in one process, or None */
} Result;

/* A plan as ``run`` needs it. What a plan holds is borrowed from it. */
typedef struct {
    PyObject_HEAD
    PyObject *plan; /* a CallPlan, Answer or PythonCall: for Python */
    PyObject *kept; /* a list of the objects whose addresses are in the key */
    enum { PYTHON, IN_MESH, OFF_MESH, ANSWER } how; /* PYTHON: run.run_planned */
    int is_compared;      /* do other ranks compare their calls with this one? */
    PyObject *answer;     /* of a question that the key answers */
    PyObject *local;      /* the function on locals */
    PyObject *keywords, *specs; /* tuples: names of keyword arguments, and specs of the results */
    PyObject *writes;     /* a tuple of the numbers of tensors that are written, or None */
    PyObject *order;      /* the numbers of the caller's arguments in the one form, or None */
    PyObject *structure;  /* off the mesh: the class of several results, or None */
    PyObject *sources;    /* off the mesh: the numbers of the tensors that the results depend on */
    PyObject *no_grad_token, *no_source_token; /* off the mesh, owned: the tokens of results without a transfer */
    int in_place, is_view, may_reuse, untracked_writes, no_graph, derives;
    Py_ssize_t nargs, nreads, nresults;
    Read *reads;
    Result *results;
} NativePlan;

static int
traverse_plan(PyObject *self, visitproc visit, void *arg)
{
    NativePlan *p = (NativePlan *)self;
    Py_VISIT(p->plan);
    Py_VISIT(p->kept);
    Py_VISIT(p->no_grad_token);
    Py_VISIT(p->no_source_token);
    for (Py_ssize_t i = 0; p->results && i < p->nresults; i++) {
        Py_VISIT(p->results[i].arguments);
    }
    return 0;
}

static void
free_plan(PyObject *self)
{
    NativePlan *p = (NativePlan *)self;
    PyObject_GC_UnTrack(self);
    for (Py_ssize_t i = 0; p->results && i < p->nresults; i++) {
        Py_XDECREF(p->results[i].arguments);
    }
    PyMem_Free(p->results);
    PyMem_Free(p->reads);
    Py_XDECREF(p->no_grad_token);
    Py_XDECREF(p->no_source_token);
    Py_XDECREF(p->plan);
    Py_XDECREF(p->kept);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject PlanType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "disttensor.dispatch._native.NativePlan",
    .tp_doc = "A CallPlan as native.c runs it.",
    .tp_basicsize = sizeof(NativePlan),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = traverse_plan,
    .tp_dealloc = free_plan,
};

/* Returns a field of a plan, borrowed: the plan is frozen. NULL: an error. */
static PyObject *
field(PyObject *plan, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(plan, name);
    Py_XDECREF(value);
    return value;
}

/* Returns a field that is a tuple, or None where may_be_none is set; else NULL. */
static PyObject *
tuple_field(PyObject *plan, PyObject *name, int may_be_none)
{
    PyObject *value = field(plan, name);
    return value && (PyTuple_CheckExact(value) || (may_be_none && value == Py_None)) ? value : NULL;
}

/* Takes in how the arguments are read (call_plan.Read). 0: not in the ways that C knows. */
static int
set_reads(NativePlan *p, PyObject *reads)
{
    p->nreads = PyTuple_GET_SIZE(reads);
    p->nargs = p->nreads - PyTuple_GET_SIZE(p->keywords);
    p->reads = PyMem_Calloc((size_t)p->nreads + 1, sizeof(Read));
    if (!p->reads || p->nreads > MOST_ARGUMENTS || p->nargs < 0) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < p->nreads; i++) {
        PyObject *read = PyTuple_GET_ITEM(reads, i), *spec, *axes, *regular, *elements;
        int kind;
        if (!PyTuple_Check(read)
            || !PyArg_ParseTuple(read, "iOO!OO!", &kind, &spec, &PyTuple_Type, &axes, &regular,
                                 &PyTuple_Type, &elements)
            || spec != Py_None || regular != Py_None || kind < 0 || kind > 2) {
            return 0;
        }
        p->reads[i].axes = axes;
        p->reads[i].kind = kind == 0                ? CONSTANT
                           : kind == 2              ? NESTED
                           : PyTuple_GET_SIZE(axes) ? VARYING
                                                    : LOCAL;
        p->no_graph = p->no_graph || PyTuple_GET_SIZE(elements);
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(p->keywords); i++) {
        if (!PyUnicode_CheckExact(PyTuple_GET_ITEM(p->keywords, i))) {
            return 0;
        }
    }
    return 1;
}

static int
set_results(NativePlan *p)
{
    p->nresults = PyTuple_GET_SIZE(p->specs);
    p->results = PyMem_Calloc((size_t)p->nresults + 1, sizeof(Result));
    for (Py_ssize_t i = 0; p->results && i < p->nresults; i++) {
        Result *result = &p->results[i];
        result->spec = PyTuple_GET_ITEM(p->specs, i);
        result->dtype = field(result->spec, state.str.dtype);
        result->viewed = result->strides = Py_None;
        PyObject *meta_tensor = get(state.meta_tensor, result->spec);
        result->arguments = meta_tensor ? PyTuple_Pack(2, state.DistTensor, meta_tensor) : NULL;
        Py_XDECREF(meta_tensor);
        if (!result->dtype || !result->arguments) {
            return 0;
        }
    }
    return p->results != NULL;
}

/* Takes in what a call off the mesh returns: a TensorResult (see infer.py) for each result. */
static int
set_template(NativePlan *p, PyObject *template)
{
    int several = Py_TYPE(template) != (PyTypeObject *)state.Out;
    p->structure = several ? (PyObject *)Py_TYPE(template) : Py_None;
    if (several && !PyTuple_CheckExact(template) && !PyList_CheckExact(template)) {
        return 0;
    }
    Py_ssize_t n = several ? PySequence_Fast_GET_SIZE(template) : 1;
    if (n < 1 || n != p->nresults) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *out = several ? PySequence_Fast_GET_ITEM(template, i) : template;
        PyObject *number, *shape, *dtype, *same;
        if (!PyTuple_Check(out)
            || !PyArg_ParseTuple(out, "OOOO!OOO", &number, &shape, &dtype, &PyTuple_Type,
                                 &p->sources, &same, &p->results[i].viewed,
                                 &p->results[i].strides)) {
            return 0;
        }
    }
    return 1;
}

/* Takes in a plan. 0: Python runs it; an error may be set. */
static int
set_plan(NativePlan *p, PyObject *plan)
{
    if (Py_TYPE(plan) == (PyTypeObject *)state.Answer) {
        p->answer = field(plan, state.str.value);
        p->how = ANSWER;
        return p->answer != NULL;
    }
    if (Py_TYPE(plan) != (PyTypeObject *)state.CallPlan
        || field(plan, state.str.native) != Py_True) {
        return 0;
    }
    p->local = field(plan, state.str.local);
    p->keywords = tuple_field(plan, state.str.keywords, 0);
    p->specs = tuple_field(plan, state.str.results, 0);
    p->writes = tuple_field(plan, state.str.writes, 1);
    PyObject *beside = tuple_field(plan, state.str.side_writes, 0);
    PyObject *reads = tuple_field(plan, state.str.reads, 0);
    PyObject *reuse = tuple_field(plan, state.str.may_reuse, 0);
    p->order = tuple_field(plan, state.str.order, 1);
    if (!p->local || !p->keywords || !p->specs || !p->writes || !reads || !reuse || !p->order
        || !beside || !set_reads(p, reads) || !set_results(p)
        || (p->order != Py_None && PyTuple_GET_SIZE(p->order) != p->nreads)) {
        return 0;
    }
    p->in_place = p->writes != Py_None;
    if (!p->in_place && PyTuple_GET_SIZE(beside)) {
        p->writes = beside;
    }
    p->may_reuse = PyTuple_GET_SIZE(reuse) > 0;
    p->derives = field(plan, state.str.derives) != Py_None;
    p->is_view = field(plan, state.str.is_view) == Py_True;
    p->untracked_writes = field(plan, state.str.untracked_writes) == Py_True;
    if (p->local != Py_None) {
        p->how = IN_MESH;
        return 1;
    }
    PyObject *template = field(plan, state.str.template), *mesh = field(plan, state.str.mesh);
    PyObject *device = mesh ? PyObject_GetAttr(mesh, state.str.device) : NULL;
    p->no_grad_token = device ? PyObject_CallOneArg(state.no_grad_token, device) : NULL;
    p->no_source_token = p->no_grad_token ? PyObject_CallOneArg(state.no_source_token, device) : NULL;
    Py_XDECREF(device);
    p->how = OFF_MESH;
    return template && p->no_source_token && set_template(p, template);
}

/* Returns a NativePlan of a plan. NULL, with an error set, where that is not one of dispatch's. */
static NativePlan *
new_plan(PyObject *kept, PyObject *plan)
{
    PyObject *call = PyObject_GetAttr(plan, state.str.call);
    PyObject *mesh = call ? PyObject_GetAttr(call, state.str.mesh) : NULL;
    NativePlan *p = mesh ? (NativePlan *)PlanType.tp_alloc(&PlanType, 0) : NULL;
    if (p) {
        p->kept = Py_NewRef(kept);
        p->plan = Py_NewRef(plan);
        p->is_compared = mesh != Py_None;
        if (!set_plan(p, plan) || PyErr_Occurred()) {
            PyErr_Clear();
            p->how = PYTHON;
        }
    }
    Py_XDECREF(mesh);
    Py_XDECREF(call);
    return p;
}

/* Tensors of a call --------------------------------------------------------------------------- */

/* Appends the tensors in a value, in order, through lists and tuples. -1: an error. */
static int
collect_in(PyObject *value, PyObject *found)
{
    if (is_tensor(value)) {
        return PyList_Append(found, value);
    }
    if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) {
        return 0;
    }
    if (Py_EnterRecursiveCall(" in a list of tensors")) {
        return -1; /* it was put into itself */
    }
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < PySequence_Fast_GET_SIZE(value); i++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
        failed = collect_in(item, found);
        Py_DECREF(item);
    }
    Py_LeaveRecursiveCall();
    return failed;
}

/* Returns all tensors of a call: a list. */
static PyObject *
tensors_of(const Call *call)
{
    PyObject *found = PyList_New(0);
    for (Py_ssize_t i = 0; found && i < call->nargs + call->nnamed; i++) {
        if (collect_in(argument(call, i), found) < 0) {
            Py_CLEAR(found);
        }
    }
    return found;
}

/* Returns the tensor with this number, borrowed. NULL: an error. */
static PyObject *
numbered(PyObject *tensors, PyObject *number)
{
    Py_ssize_t i = PyLong_AsSsize_t(number);
    if (i < 0 || i >= PyList_GET_SIZE(tensors)) {
        PyErr_SetString(PyExc_SystemError, "a plan names a tensor that the call does not have");
        return NULL;
    }
    return PyList_GET_ITEM(tensors, i);
}

/* Wrappers ------------------------------------------------------------------------------------ */

/* Returns a DistTensor of a local. Steals local. */
static PyObject *
wrap(const Result *result, PyObject *local)
{
    PyObject *new = PyObject_Call(state.make_subclass, result->arguments, NULL);
    if (new && (set(state.local, new, local) < 0 || set(state.spec, new, result->spec) < 0)) {
        Py_CLEAR(new);
    }
    Py_DECREF(local);
    return new;
}

/* Returns whether a local result is a torch.Tensor of the expected dtype. -1: an error. */
static int
is_expected(const Result *result, PyObject *local)
{
    if (Py_TYPE(local) != (PyTypeObject *)state.Tensor) {
        return 0;
    }
    PyObject *dtype = get(state.dtype, local);
    Py_XDECREF(dtype);
    return dtype ? dtype == result->dtype : -1;
}

/* Returns local results as DistTensors, in their structure. Steals out. Python wraps results that are
 * not as expected: of another dtype, as under autocast, or in a named tuple. */
static PyObject *
wrap_outputs(const NativePlan *p, PyObject *out)
{
    PyObject *results = NULL;
    int list = PyList_CheckExact(out), expected = 0;
    if (!list && !PyTuple_CheckExact(out)) {
        expected = p->nresults ? is_expected(p->results, out) : 0;
        if (expected > 0) {
            return wrap(p->results, out);
        }
    }
    else if (PySequence_Fast_GET_SIZE(out) == p->nresults) {
        PyObject *locals = PySequence_Tuple(out);
        results = locals ? PyTuple_New(p->nresults) : NULL;
        expected = results ? 1 : -1;
        for (Py_ssize_t i = 0; expected > 0 && i < p->nresults; i++) {
            PyObject *local = PyTuple_GET_ITEM(locals, i), *new = NULL;
            expected = is_expected(&p->results[i], local);
            if (expected > 0 && !(new = wrap(&p->results[i], Py_NewRef(local)))) {
                expected = -1;
            }
            PyTuple_SET_ITEM(results, i, new);
        }
        Py_XDECREF(locals);
        if (expected > 0 && list) {
            Py_SETREF(results, PySequence_List(results));
        }
    }
    if (expected <= 0) {
        Py_CLEAR(results);
    }
    if (expected == 0) {
        results = PyObject_CallFunctionObjArgs(state.wrap_outputs, out, p->specs, NULL);
    }
    Py_DECREF(out);
    return results;
}

/* Running ------------------------------------------------------------------------------------- */

static PyObject *
run_in_python(const NativePlan *p, Call *call)
{
    if (!as_python(call)) {
        return NULL;
    }
    PyObject *args[] = {p->plan, call->args, call->kwargs ? call->kwargs : Py_None};
    return PyObject_Vectorcall(state.run_planned, args, 3, NULL);
}

/* Returns whether autograd records what is made of a local. -1: an error. */
static int
in_graph(PyObject *local)
{
    int needs = is_true(get(state.requires_grad, local));
    return needs > 0 ? is_true(PyObject_CallNoArgs(state.is_grad_enabled)) : needs;
}

/* Returns the local for a use that varies over axes: the Alias of a leaf, marked by -1, which
 * mostly exists, or the local itself where no gradient comes back. Python makes all others. */
static PyObject *
local_for(PyObject *x, PyObject *axes)
{
    PyObject *uses = PyObject_GetAttr(x, state.str._uses), *found = NULL;
    int no_aliases = uses == Py_None;
    if (uses && Py_TYPE(uses) == (PyTypeObject *)state.Uses) {
        PyObject *aliases = PyObject_GetAttr(uses, state.str.aliases), *hit = NULL;
        no_aliases = aliases == Py_None;
        if (aliases && PyDict_CheckExact(aliases)) {
            hit = PyDict_GetItemWithError(aliases, axes);
        }
        if (hit && PyTuple_Check(hit) && PyTuple_GET_SIZE(hit) == 3
            && PyLong_AsLongLong(PyTuple_GET_ITEM(hit, 1)) < 0 && !PyErr_Occurred()) {
            found = Py_NewRef(PyTuple_GET_ITEM(hit, 0));
        }
        Py_XDECREF(aliases);
    }
    Py_XDECREF(uses);
    if (no_aliases && !PyErr_Occurred()) {
        PyObject *local = get(state.local, x);
        int graph = local ? in_graph(local) : -1;
        if (graph == 0) {
            return local;
        }
        Py_XDECREF(local);
    }
    return found || PyErr_Occurred() ? found
                                     : PyObject_CallMethodOneArg(x, state.str.local_for, axes);
}

/* Returns a list or tuple with the locals of the DistTensors in it. */
static PyObject *
locals_of(PyObject *value)
{
    if (is_dist(value)) {
        return get(state.local, value);
    }
    int list = PyList_CheckExact(value);
    if (!list && !PyTuple_CheckExact(value)) {
        return Py_NewRef(value);
    }
    if (Py_EnterRecursiveCall(" in a list of tensors")) {
        return NULL; /* it was put into itself */
    }
    PyObject *copy = PySequence_Tuple(value);
    PyObject *locals = copy ? PyTuple_New(PyTuple_GET_SIZE(copy)) : NULL;
    for (Py_ssize_t i = 0; locals && i < PyTuple_GET_SIZE(copy); i++) {
        PyObject *local = locals_of(PyTuple_GET_ITEM(copy, i));
        if (local) {
            PyTuple_SET_ITEM(locals, i, local);
        }
        else {
            Py_CLEAR(locals);
        }
    }
    Py_XDECREF(copy);
    Py_LeaveRecursiveCall();
    if (locals && list) {
        Py_SETREF(locals, PySequence_List(locals));
    }
    return locals;
}

/* Returns whether the arguments fit the plan. 0: Python runs the call. -1: an error. */
static int
fits(const NativePlan *p, const Call *call, PyObject *tensors)
{
    int fine = p->nargs == call->nargs && p->nreads == call->nargs + call->nnamed;
    if (fine && p->no_graph) {
        fine = is_true(PyObject_CallNoArgs(state.is_grad_enabled));
        fine = fine < 0 ? -1 : !fine;
    }
    if (fine > 0 && p->is_view && call->nargs && is_dist(call->first[0])) {
        fine = is_none(call->first[0], state.str._view_state); /* no copy in place of a view */
    }
    Py_ssize_t nwrites = p->writes == Py_None ? 0 : PyTuple_GET_SIZE(p->writes);
    for (Py_ssize_t i = 0; fine > 0 && i < nwrites; i++) {
        PyObject *x = numbered(tensors, PyTuple_GET_ITEM(p->writes, i));
        fine = !x ? -1 : is_dist(x) ? is_none(x, state.str._view_state) : 1;
    }
    for (Py_ssize_t i = 0; fine > 0 && p->may_reuse && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *x = PyList_GET_ITEM(tensors, i);
        fine = is_dist(x) ? is_none(x, state.str._reduced) : 1;
    }
    return fine;
}

/* Returns whether x has no alias or derivation that a write makes stale. Aliases of a leaf share its
 * memory and stay. -1: an error. */
static int
has_no_uses(PyObject *x)
{
    int none = is_none(x, state.str._uses);
    if (!none) {
        PyObject *local = get(state.local, x);
        none = local ? is_true(get(state.is_leaf, local)) : -1;
        Py_XDECREF(local);
    }
    return none;
}

/* Invalidates what was kept of the old value of x, as writes.mark_written. -1: an error. */
static int
mark_written(PyObject *x)
{
    int nothing = !PyObject_IsTrue(state.LIVE);
    nothing = nothing ? is_none(x, state.str._reduced) : 0;
    nothing = nothing > 0 ? has_no_uses(x) : nothing;
    if (nothing) {
        return nothing < 0 ? -1 : 0;
    }
    PyObject *done = PyObject_CallOneArg(state.written, x);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* After a call that writes: counts the writes that autograd does not count, and invalidates the uses of
 * the old values. -1: an error. */
static int
mark_all_written(const NativePlan *p, PyObject *tensors)
{
    Py_ssize_t n = PyTuple_GET_SIZE(p->writes);
    PyObject *targets = PyTuple_New(n), *x;
    for (Py_ssize_t i = 0; targets && i < n; i++) {
        x = numbered(tensors, PyTuple_GET_ITEM(p->writes, i));
        PyTuple_SET_ITEM(targets, i, Py_XNewRef(x));
        if (!x) {
            Py_CLEAR(targets);
        }
    }
    int failed = targets ? 0 : -1;
    if (targets && p->untracked_writes) {
        PyObject *locals = locals_of(targets);
        PyObject *done = locals ? PyObject_Call(state.count, locals, NULL) : NULL;
        failed = done ? 0 : -1;
        Py_XDECREF(done);
        Py_XDECREF(locals);
    }
    for (Py_ssize_t i = 0; !failed && i < n; i++) {
        x = PyTuple_GET_ITEM(targets, i);
        failed = is_dist(x) ? mark_written(x) : 0;
    }
    Py_XDECREF(targets);
    return failed;
}

/* Records from what a result was made. */
static int
derive(const NativePlan *p, Call *call, PyObject *result)
{
    PyObject *done = NULL;
    if (as_python(call)) {
        PyObject *kwargs = call->kwargs ? call->kwargs : Py_None;
        PyObject *args[] = {p->plan, call->args, kwargs, result};
        done = PyObject_Vectorcall(state.derive, args, 4, NULL);
    }
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Wraps what the local function returned. Steals out. */
static PyObject *
finish(const NativePlan *p, Call *call, PyObject *out)
{
    PyObject *x = call->nargs && is_dist(call->first[0]) ? call->first[0] : NULL;
    if (x) { /* as of x.contiguous() */
        PyObject *local = get(state.local, x);
        Py_XDECREF(local);
        if (!local || local == out) {
            Py_DECREF(out);
            return local ? Py_NewRef(x) : NULL;
        }
    }
    int graph = 0;
    if (p->derives && PyObject_TypeCheck(out, (PyTypeObject *)state.Tensor)) {
        graph = in_graph(out);
    }
    if (graph < 0) {
        Py_DECREF(out);
        return NULL;
    }
    PyObject *result = wrap_outputs(p, out);
    if (graph && result && derive(p, call, result) < 0) {
        Py_CLEAR(result);
    }
    return result;
}

/* Reads the locals, calls the local function on them, and wraps the results. */
static PyObject *
run_in_mesh(const NativePlan *p, Call *call, PyObject *tensors)
{
    /* the first is free for the function that is called: PY_VECTORCALL_ARGUMENTS_OFFSET */
    PyObject *stack[MOST_ARGUMENTS + 1], **locals = stack + 1, *out = NULL, *result = NULL;
    Py_ssize_t n = 0;
    state.in_c++;
    for (; n < p->nreads; n++) {
        PyObject *value = argument(call, n);
        const Read *read = &p->reads[n];
        locals[n] = read->kind == CONSTANT  ? Py_NewRef(value)
                    : read->kind == LOCAL   ? get(state.local, value)
                    : read->kind == VARYING ? local_for(value, read->axes)
                                            : locals_of(value);
        if (!locals[n]) {
            break;
        }
    }
    if (n == p->nreads) {
        size_t flags = (size_t)p->nargs | PY_VECTORCALL_ARGUMENTS_OFFSET;
        PyObject *names = PyTuple_GET_SIZE(p->keywords) ? p->keywords : NULL;
        out = PyObject_Vectorcall(p->local, locals, flags, names);
    }
    if (out && p->writes != Py_None && mark_all_written(p, tensors) < 0) {
        Py_CLEAR(out);
    }
    if (out && !p->in_place) {
        result = finish(p, call, out);
    }
    else if (out) {
        result = Py_NewRef(out == Py_None ? Py_None : argument(call, 0));
        Py_DECREF(out);
    }
    while (n > 0) {
        Py_DECREF(locals[--n]);
    }
    return result;
}

/* Returns the token of a result off the mesh, from the tokens of its sources. NULL without an error:
 * two sources depend on transfers, and Python joins their tokens. */
static PyObject *
join(const NativePlan *p, PyObject *tensors)
{
    PyObject *joined = p->no_grad_token; /* borrowed: the tensors and the plan hold all tokens */
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(p->sources); i++) {
        PyObject *x = numbered(tensors, PyTuple_GET_ITEM(p->sources, i));
        PyObject *token = x && is_dist(x) ? get(state.local, x) : NULL, *node;
        Py_XDECREF(token);
        if (!token || Py_TYPE(token) != (PyTypeObject *)state.Tensor) {
            return NULL;
        }
        int needs = token == p->no_source_token;
        if (!needs && token != joined && token != p->no_grad_token) {
            if (!(node = get(state.grad_fn, token))) {
                return NULL;
            }
            Py_DECREF(node);
            if (node != Py_None && joined != p->no_grad_token && joined != p->no_source_token) {
                return NULL;
            }
            joined = node == Py_None ? joined : token; /* a transfer, or not */
            needs = node == Py_None ? is_true(get(state.requires_grad, token)) : 0;
        }
        if (needs < 0) {
            return NULL;
        }
        joined = needs && joined == p->no_grad_token ? p->no_source_token : joined;
    }
    if (joined != p->no_grad_token) {
        int graph = is_true(PyObject_CallNoArgs(state.is_grad_enabled));
        joined = graph < 0 ? NULL : graph ? joined : p->no_grad_token;
    }
    return Py_XNewRef(joined);
}

/* Returns whether all tensors are contiguous in one process, as the plan takes for granted. -1: an
 * error. */
static int
have_no_strides(PyObject *tensors)
{
    int none = 1;
    for (Py_ssize_t i = 0; none > 0 && i < PyList_GET_SIZE(tensors); i++) {
        PyObject *x = PyList_GET_ITEM(tensors, i);
        PyObject *views = is_dist(x) ? PyObject_GetAttr(x, state.str._view_state) : Py_None;
        none = !views ? -1 : views == Py_None ? 1 : is_none(views, state.str.strides);
        if (views && views != Py_None) {
            Py_DECREF(views);
        }
    }
    return none;
}

/* Makes the wrappers of a call off the mesh; no kernel runs. NULL without an error: Python runs it. */
static PyObject *
run_off_mesh(const NativePlan *p, PyObject *tensors)
{
    int autocast = is_true(PyObject_CallNoArgs(state.autocast_is_on));
    PyObject *token = autocast || have_no_strides(tensors) <= 0 ? NULL : join(p, tensors);
    if (!token) {
        return NULL;
    }
    PyObject *results = PyTuple_New(p->nresults);
    for (Py_ssize_t i = 0; results && i < p->nresults; i++) {
        const Result *result = &p->results[i];
        PyObject *new = wrap(result, Py_NewRef(token));
        if (new && result->viewed != Py_None) {
            PyObject *base = numbered(tensors, result->viewed);
            PyObject *args[] = {new, base, result->strides};
            PyObject *done = base ? PyObject_Vectorcall(state.share, args, 3, NULL) : NULL;
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
    Py_DECREF(token);
    state.in_c += results != NULL;
    if (results && p->structure == Py_None) {
        Py_SETREF(results, Py_NewRef(PyTuple_GET_ITEM(results, 0)));
    }
    else if (results && p->structure == (PyObject *)&PyList_Type) {
        Py_SETREF(results, PySequence_List(results));
    }
    return results;
}

/* Runs a call in its one form. NULL without an error: its arguments do not fit the plan. */
static PyObject *
run_form(const NativePlan *p, Call *call)
{
    int needs_list = p->how == OFF_MESH || p->may_reuse || p->writes != Py_None;
    PyObject *tensors = needs_list ? tensors_of(call) : NULL, *result = NULL;
    int fine = needs_list && !tensors ? -1 : fits(p, call, tensors);
    if (fine > 0) {
        result = p->how == IN_MESH ? run_in_mesh(p, call, tensors) : run_off_mesh(p, tensors);
    }
    Py_XDECREF(tensors);
    return result;
}

/* Runs a call whose arguments the plan has in another order, as dispatch/run.py does. */
static PyObject *
run_in_order(const NativePlan *p, const Call *call)
{
    Call form; /* mostly uninitialized, which is faster */
    PyObject *given[MOST_ARGUMENTS], *result;
    form.func = call->func;
    form.args = form.kwargs = NULL;
    form.first = given;
    form.nargs = p->nargs;
    form.nnamed = p->nreads - p->nargs;
    for (Py_ssize_t i = 0; i < p->nreads; i++) {
        Py_ssize_t from = PyLong_AsSsize_t(PyTuple_GET_ITEM(p->order, i));
        if (from < 0 || from >= call->nargs + call->nnamed) {
            return NULL;
        }
        *(i < p->nargs ? &given[i] : &form.values[i - p->nargs]) = argument(call, from);
    }
    for (Py_ssize_t i = 0; i < form.nnamed; i++) {
        form.names[i] = PyTuple_GET_ITEM(p->keywords, i);
    }
    result = run_form(p, &form);
    Py_XDECREF(form.args);
    Py_XDECREF(form.kwargs);
    return result;
}

/* Runs a call whose plan C knows, unless its arguments do not fit the plan. */
static PyObject *
run_natively(const NativePlan *p, Call *call)
{
    PyObject *result = p->order == Py_None ? run_form(p, call) : run_in_order(p, call);
    return result || PyErr_Occurred() ? result : run_in_python(p, call);
}

/* A call has raised, perhaps on this rank alone. */
static void
note_error(PyObject *plan, const Call *call)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *target = call->nargs ? call->first[0] : Py_None;
    PyObject *done = PyObject_CallFunctionObjArgs(state.note_error, error, plan, target, NULL);
    if (!done) {
        PyErr_Clear();
    }
    Py_XDECREF(done);
    PyErr_Restore(type, error, trace);
}

/* Runs a known call. */
static PyObject *
run(NativePlan *p, Call *call)
{
    PyObject *result = NULL;
    Py_INCREF(p); /* Python code in the call may clear the dict */
    state.known++;
    PyObject *done = p->is_compared ? PyObject_CallOneArg(state.note, p->plan) : NULL;
    if (done || !p->is_compared) {
        state.in_c += p->how == ANSWER;
        result = p->how == ANSWER   ? Py_NewRef(p->answer)
                 : p->how == PYTHON ? run_in_python(p, call)
                                    : run_natively(p, call);
    }
    Py_XDECREF(done);
    if (!result) {
        note_error(p->plan, call);
    }
    Py_DECREF(p);
    return result;
}

/* Dispatch ------------------------------------------------------------------------------------ */

/* Python runs the call. */
static PyObject *
dispatch_in_python(const Call *call)
{
    state.unsure++;
    PyObject *kwargs = call->kwargs ? call->kwargs : Py_None;
    return PyObject_CallFunctionObjArgs(state.dispatch, state.DistTensor, call->func, Py_None,
                                        call->args, kwargs, NULL);
}

/* Runs the first call of a key in Python, and keeps the plan. */
static PyObject *
first_call(const Call *call, PyObject *key, PyObject *kept)
{
    state.first++;
    PyObject *kwargs = call->kwargs ? call->kwargs : Py_None;
    PyObject *found = PyObject_CallFunctionObjArgs(state.first_call, call->func, call->args, kwargs,
                                                   NULL);
    PyObject *result, *plan;
    if (!found || !PyArg_ParseTuple(found, "OO", &result, &plan)) {
        Py_XDECREF(found);
        return NULL;
    }
    Py_INCREF(result);
    if (plan != Py_None) {
        if (PyDict_GET_SIZE(state.plans) >= MOST_PLANS) {
            PyDict_Clear(state.plans); /* those that are needed come back from Python's table */
        }
        NativePlan *p = new_plan(kept, plan);
        if (!p || PyDict_SetItem(state.plans, key, (PyObject *)p) < 0) {
            PyErr_Clear(); /* the call itself was right */
        }
        Py_XDECREF(p);
    }
    Py_DECREF(found);
    return result;
}

/* Returns the plan of a call, and sets *key. NULL: there is no plan; or there is no key, which is
 * NULL then, and an error may be set. */
static NativePlan *
find(const Call *call, PyObject **key)
{
    *key = key_of(call, NULL);
    return *key ? (NativePlan *)PyDict_GetItemWithError(state.plans, *key) : NULL;
}

/* Clears an error of a key. 0: it stays, such as a KeyboardInterrupt in code of the user. */
static int
clear_error(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return 0;
    }
    PyErr_Clear();
    return 1;
}

static PyObject *
find_and_run(Call *call)
{
    PyObject *key, *kept = NULL, *result;
    NativePlan *p = find(call, &key);
    if (p) {
        result = run(p, call);
        Py_DECREF(key);
        return result;
    }
    if (key && (kept = PyList_New(0))) { /* once more, to keep what is in the key */
        Py_SETREF(key, key_of(call, kept));
    }
    if (key && kept) {
        result = first_call(call, key, kept);
    }
    else {
        result = clear_error() ? dispatch_in_python(call) : NULL;
    }
    Py_XDECREF(kept);
    Py_XDECREF(key);
    return result;
}

/* Returns whether torch calls __torch_function__ of DistTensor first, before any function mode. */
static int
calls_are_ours(void)
{
    int seen = is_true(PyObject_CallNoArgs(state.functions_are_seen));
    int modes = seen > 0 ? is_true(PyObject_CallNoArgs(state.modes_see_functions)) : 0;
    if (seen < 0 || modes < 0) {
        PyErr_Clear();
        return 0;
    }
    return seen && !modes;
}

/* A method of DistTensor. A call with a known key runs at once: torch has checked the arguments of
 * such a call. All others take torch's way, which ends in dispatch. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *of_tensor; /* the method of torch.Tensor */
    PyObject *function;  /* what torch passes to __torch_function__ for it */
} Method;

static PyObject *
call_method(PyObject *self, PyObject *const *given, size_t flags, PyObject *keywords)
{
    const Method *of = (Method *)self;
    Py_ssize_t n = PyVectorcall_NARGS(flags), named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    if (state.enabled && n && is_dist(given[0]) && n + named <= MOST_ARGUMENTS
        && state.nested < MOST_NESTED && calls_are_ours()) {
        Call call; /* mostly uninitialized, which is faster */
        call.func = of->function;
        call.args = call.kwargs = NULL;
        call.first = given;
        call.nargs = n;
        call.nnamed = named;
        for (Py_ssize_t i = 0; i < named; i++) {
            call.names[i] = PyTuple_GET_ITEM(keywords, i);
            call.values[i] = given[n + i];
        }
        PyObject *key, *result;
        NativePlan *p = find(&call, &key);
        Py_XDECREF(key);
        if (p) {
            state.past++;
            state.nested++;
            result = run(p, &call);
            state.nested--;
            Py_XDECREF(call.args);
            Py_XDECREF(call.kwargs);
            return result;
        }
        if (!clear_error()) {
            return NULL;
        }
    }
    return PyObject_Vectorcall(of->of_tensor, given, flags, keywords);
}

static PyObject *
bind_method(PyObject *self, PyObject *object, PyObject *Py_UNUSED(type))
{
    return object && object != Py_None ? PyMethod_New(self, object) : Py_NewRef(self);
}

static PyObject *
method_attribute(PyObject *self, PyObject *name)
{
    return PyObject_GetAttr(((Method *)self)->of_tensor, name);
}

static int
traverse_method(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((Method *)self)->of_tensor);
    Py_VISIT(((Method *)self)->function);
    return 0;
}

static void
free_method(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(((Method *)self)->of_tensor);
    Py_XDECREF(((Method *)self)->function);
    Py_TYPE(self)->tp_free(self);
}

static PyTypeObject MethodType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "disttensor.dispatch._native.Method",
    .tp_doc = "A method of DistTensor in place of one of torch.Tensor.",
    .tp_basicsize = sizeof(Method),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL
                | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_vectorcall_offset = offsetof(Method, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = bind_method,
    .tp_getattro = method_attribute, /* names and docstrings are those of torch.Tensor's method */
    .tp_traverse = traverse_method,
    .tp_dealloc = free_method,
};

static PyObject *
make_method(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t n)
{
    Method *made = n == 2 ? (Method *)MethodType.tp_alloc(&MethodType, 0) : NULL;
    if (n != 2) {
        PyErr_SetString(PyExc_TypeError, "method takes a method of torch.Tensor and a function");
    }
    if (made) {
        made->vectorcall = call_method;
        made->of_tensor = Py_NewRef(given[0]);
        made->function = Py_NewRef(given[1]);
    }
    return (PyObject *)made;
}

static PyObject *
dispatch(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t n, PyObject *keywords)
{
    Call call; /* mostly uninitialized, which is faster */
    int is_usual = !keywords && n >= 3 && n <= 4;
    call.func = is_usual ? given[0] : NULL;
    call.args = is_usual ? given[2] : NULL;
    call.kwargs = is_usual && n == 4 && given[3] != Py_None ? given[3] : NULL;
    call.nnamed = 0;
    if (!state.enabled || !is_usual || !PyTuple_CheckExact(call.args)
        || (call.kwargs && !PyDict_CheckExact(call.kwargs))
        || PyTuple_GET_SIZE(call.args) + (call.kwargs ? PyDict_GET_SIZE(call.kwargs) : 0)
               > MOST_ARGUMENTS) {
        PyObject *stack[MOST_ARGUMENTS + 1]; /* as it was called, with the class before it */
        Py_ssize_t more = keywords ? PyTuple_GET_SIZE(keywords) : 0;
        if (!state.dispatch || n + more > MOST_ARGUMENTS) {
            PyErr_SetString(PyExc_TypeError, "dispatch takes func, types, args and kwargs, after "
                                             "configure");
            return NULL;
        }
        stack[0] = state.DistTensor;
        memcpy(stack + 1, given, (size_t)(n + more) * sizeof(PyObject *));
        return PyObject_Vectorcall(state.dispatch, stack, (size_t)n + 1, keywords);
    }
    call.nargs = PyTuple_GET_SIZE(call.args);
    call.first = &PyTuple_GET_ITEM(call.args, 0);
    PyObject *name, *value, *result = NULL;
    Py_ssize_t at = 0;
    while (call.kwargs && PyDict_Next(call.kwargs, &at, &name, &value)) {
        call.names[call.nnamed] = Py_NewRef(name);
        call.values[call.nnamed++] = Py_NewRef(value);
    }
    state.nested++;
    result = state.nested > MOST_NESTED ? dispatch_in_python(&call)
                                         : find_and_run(&call);
    state.nested--;
    while (call.nnamed) {
        Py_DECREF(call.names[--call.nnamed]);
        Py_DECREF(call.values[call.nnamed]);
    }
    return result;
}

/* The module ---------------------------------------------------------------------------------- */

static PyObject *
configure(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    if (PyTuple_GET_SIZE(args) || !kwargs) {
        return PyErr_Format(PyExc_TypeError, "configure takes keyword arguments");
    }
#define CHECK(name) \
    if (!PyDict_GetItemString(kwargs, #name)) { \
        return PyErr_Format(PyExc_TypeError, "configure needs " #name); \
    }
    REFERENCES(CHECK)
#undef CHECK
    static const char *const descriptors[] = {"local", "spec", "meta_tensor", "shape", "dtype",
                                              "requires_grad", "grad_fn", "is_leaf", "integers"};
    for (size_t i = 0; i < sizeof(descriptors) / sizeof(*descriptors); i++) {
        PyTypeObject *type = Py_TYPE(PyDict_GetItemString(kwargs, descriptors[i]));
        if (!type->tp_descr_get || !type->tp_descr_set) {
            return PyErr_Format(PyExc_TypeError, "%s cannot be set", descriptors[i]);
        }
    }
    if (state.dispatch) { /* calls that run use the references */
        return PyErr_Format(PyExc_RuntimeError, "configure is called once");
    }
#define TAKE(name) state.name = Py_NewRef(PyDict_GetItemString(kwargs, #name));
    REFERENCES(TAKE)
#undef TAKE
    Py_RETURN_NONE;
}

static PyObject *
enable(PyObject *Py_UNUSED(module), PyObject *on)
{
    state.enabled = on == Py_True && state.dispatch;
    Py_RETURN_NONE;
}

static PyObject *
counts(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return Py_BuildValue("{s:L,s:L,s:L,s:L,s:L,s:n}", "known", state.known, "in_c", state.in_c,
                         "first", state.first, "unsure", state.unsure, "past", state.past, "kinds",
                         PyDict_GET_SIZE(state.plans));
}

static int
init_module(PyObject *module)
{
    if (state.plans || PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError,
                        "disttensor's C code is loaded once, in the main interpreter");
        return -1;
    }
#define INTERN(name) \
    state.str.name = PyUnicode_InternFromString(#name); \
    if (!state.str.name) { \
        return -1; \
    }
    NAMES(INTERN)
#undef INTERN
    state.plans = PyDict_New();
    if (!state.plans || PyType_Ready(&PlanType) < 0 || PyType_Ready(&MethodType) < 0
        || PyModule_AddObjectRef(module, "plans", state.plans) < 0) {
        return -1;
    }
    return PyModule_AddStringConstant(module, "SOURCE", SOURCE);
}

static PyMethodDef methods[] = {
    {"dispatch", (PyCFunction)(void (*)(void))dispatch, METH_FASTCALL | METH_KEYWORDS,
     "dispatch(func, types, args=(), kwargs=None)\n--\n\n"
     "DistTensor.__torch_function__. A builtin is not bound to the class, so torch passes no class."},
    {"configure", (PyCFunction)(void (*)(void))configure, METH_VARARGS | METH_KEYWORDS,
     "configure(**references)\n--\n\n"
     "Takes what this code calls and reads, by the names of REFERENCES."},
    {"counts", counts, METH_NOARGS,
     "counts()\n--\n\n"
     "Returns the numbers of calls so far: with a known key, of these in C, first calls of a key,\n"
     "without a key in C, known without torch's parser; and the number of known keys."},
    {"method", (PyCFunction)(void (*)(void))make_method, METH_FASTCALL,
     "method(of_tensor, function)\n--\n\n"
     "Returns a method for DistTensor in place of one of torch.Tensor. ``function``: what torch\n"
     "passes to __torch_function__ for it."},
    {"enable", enable, METH_O,
     "enable(on)\n--\n\n"
     "Sets whether calls run in C, or are passed to ``dispatch`` in Python."},
    {NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, init_module}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "The warm path of disttensor.dispatch in C: see native.c.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
