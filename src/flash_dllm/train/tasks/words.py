"""Word lists shared by the task families. Kept small so that nearly every word is one token."""

GIRLS = ("Maya Anna Lily Emma Sara Nina Julia Clara Rosa Zoe Mia Ella Grace Hana Ivy Leila Nora Olga Petra "
         "Ruth Tina Vera").split()
BOYS = ("Leo Tom Ben Sam Max Noah Adam Omar Paul Ravi Ken Luca Hugo Ivan Jack Karl Mark Otto Peter Sean "
        "Tim Victor").split()
NAMES = tuple(sorted((*GIRLS, *BOYS)))

THINGS = ("apples", "books", "cards", "coins", "cookies", "eggs", "flowers", "lemons", "marbles", "oranges",
          "pears", "pencils", "pens", "shells", "stamps", "stickers", "stones", "toys", "cakes", "candles",
          "balls", "buttons", "cups", "nuts", "plums", "ribbons", "rings", "beads")
FOOD = ("cookies", "muffins", "rolls", "pies", "cakes", "buns", "donuts", "tarts")
FRUIT = ("apples", "pears", "lemons", "oranges", "plums", "peaches", "figs")
PACKS = ("boxes", "bags", "jars", "baskets", "packs", "crates")
GOODS = ("pens", "notebooks", "cups", "plates", "lamps", "shirts", "hats", "scarves", "toys", "books", "chairs",
         "plants")
COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "pink", "purple", "gray")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
          "November", "December")
PLACES = ("park", "garden", "market", "school", "library", "beach", "forest", "museum", "station", "bakery",
          "farm", "river", "kitchen", "village", "castle", "harbor")
ANIMALS = ("dog", "cat", "fox", "rabbit", "bear", "duck", "horse", "mouse", "frog", "goat", "hen", "wolf",
           "turtle", "squirrel", "crow")
OBJECTS = ("book", "key", "lamp", "map", "box", "coin", "hat", "bag", "cup", "ball", "kite", "drum", "bell",
           "clock", "ring", "shell", "letter", "boat", "basket", "mirror")
WORDS = ("apple", "river", "cloud", "stone", "music", "paper", "tiger", "green", "happy", "window", "garden",
         "winter", "silver", "bread", "train", "sugar", "house", "light", "plant", "smile", "table", "water",
         "night", "chair", "dance", "horse", "lemon", "money", "ocean", "queen")
CITIES = ("Paris", "London", "Rome", "Berlin", "Madrid", "Oslo", "Tokyo", "Cairo", "Lima", "Athens", "Vienna",
          "Dublin", "Lisbon", "Prague", "Delhi", "Boston")
JOBS = ("teacher", "doctor", "baker", "farmer", "nurse", "driver", "singer", "painter", "cook", "pilot",
        "writer", "gardener")
FEELINGS = ("happy", "tired", "proud", "sad", "calm", "glad", "excited", "nervous")


def girl(name: str) -> bool:
    """Whether stories call this person 'she'."""
    return name in _GIRLS


_GIRLS = frozenset(GIRLS)
